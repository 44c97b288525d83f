"""Structured outputs: from the format that a request wants to masks over token ids, by llguidance.

Nothing else imports that library. A grammar is tried in another process, compiled and cached; each text has its own walk
through it.
"""

from foredraft.text.grammar.compiled import Grammar, Grammars
from foredraft.text.grammar.limits import GrammarLimits, Meter
from foredraft.text.grammar.walk import GrammarWalk

__all__ = ["Grammar", "GrammarLimits", "GrammarWalk", "Grammars", "Meter"]
