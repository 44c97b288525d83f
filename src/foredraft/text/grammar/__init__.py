"""Structured outputs: from what a request says its text may look like to masks over token ids, by llguidance.

The only place that knows that library. A grammar is tried in another process, compiled and kept; each text walks it by itself.
"""

from foredraft.text.grammar.compiled import Grammar, Grammars
from foredraft.text.grammar.limits import GrammarLimits, Meter
from foredraft.text.grammar.walk import GrammarWalk

__all__ = ["Grammar", "GrammarLimits", "GrammarWalk", "Grammars", "Meter"]
