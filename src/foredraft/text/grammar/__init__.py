"""Structured outputs: turns the format that a request asks for into masks over token ids, with llguidance.

Only this package imports llguidance. A grammar is tried in another process, then compiled here and cached; each text has its
own walk through it.
"""

from foredraft.text.grammar.compiled import Grammar, Grammars
from foredraft.text.grammar.limits import GrammarLimits, Meter
from foredraft.text.grammar.walk import GrammarWalk

__all__ = ["Grammar", "GrammarLimits", "GrammarWalk", "Grammars", "Meter"]
