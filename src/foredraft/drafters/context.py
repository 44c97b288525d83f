"""The inputs that drafters are built from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from foredraft.drafters.refit_schedule import RefitSchedule
from foredraft.engine.memory_pool import MemoryPool
from foredraft.heads import AnyHead
from foredraft.model import LanguageModel
from foredraft.remote import DraftServerAccess, VocabularyIdentity
from foredraft.vocabulary import VocabularyPair


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """The inputs that a drafter may be built from. draft_model is None unless the user gave one.

    pool: a drafter takes all memory for its sequences' keys and values from here, and gives it back.
    max_rows: how many tokens a drafter may read in one pass of its own model. head: None unless the user gave a head instead of
    a draft model. context_len: the maximum sequence length of the target. vocabularies: the target's and the draft model's, if they
    differ. draft_server: None unless the user gave one. vocabulary: the target's, as it is sent to a draft server. refits: when a
    drafter that can adapt learns from the texts; None: never.
    """

    vocab_size: int
    pool: MemoryPool
    draft_model: LanguageModel | None = None
    max_rows: int = 512
    head: AnyHead | None = None
    context_len: int = 1 << 62
    vocabularies: VocabularyPair | None = None
    draft_server: DraftServerAccess | None = None
    vocabulary: VocabularyIdentity | None = None
    refits: RefitSchedule | None = None

    @property
    def vocabulary_method(self) -> str:
        """How a draft model with another vocabulary is used; "same" if it has the target's vocabulary."""
        return "same" if self.vocabularies is None else self.vocabularies.method

    def in_draft_vocabulary(self) -> DrafterContext:
        """The context for a drafter that reads and writes the draft model's ids."""
        width = self.vocab_size if self.draft_model is None else self.draft_model.traits.vocab_size
        return replace(self, vocab_size=width, vocabularies=None)
