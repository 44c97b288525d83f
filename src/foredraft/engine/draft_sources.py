"""The models that drafters draft with, and the cache memory that these need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from foredraft.drafters import DrafterContext, RefitSchedule, build
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.methods import Method, draft_of, name_of
from foredraft.engine.proposal import Drafter
from foredraft.engine.scheduler import Limits
from foredraft.heads import AnyHead
from foredraft.model import LanguageModel
from foredraft.remote import DraftServerAccess, VocabularyIdentity
from foredraft.vocabulary import VocabularyPair

_CACHE_SHARE = 0.5
_UNKNOWN_MEMORY = 4 * 2**30


@dataclass(frozen=True, slots=True)
class DraftSources:
    """The models that the drafters of a target may use.

    drafts: draft models, by draft_of. head: the head that drafts in place of a draft model. vocabularies: for draft models whose
    vocabulary differs from the target's, by draft_of. tokenizer: the target's, which identifies its vocabulary to a draft server.
    """

    target: LanguageModel
    drafts: Mapping[str, LanguageModel]
    head: AnyHead | None = None
    vocabularies: Mapping[str, VocabularyPair] = field(default_factory=dict)
    tokenizer: PreTrainedTokenizerBase | None = None
    draft_server: DraftServerAccess | None = None

    def drafters(
        self,
        methods: Sequence[Method],
        limits: Limits,
        pool: MemoryPool,
        new_refits: Callable[[], RefitSchedule | None] = lambda: None,
    ) -> dict[str, Drafter]:
        """New drafters by name. pool: the memory that they share with the target. new_refits: makes DrafterContext.refits."""
        vocab_size, server = self.target.traits.vocab_size, self.draft_server
        vocabulary = None if server is None else VocabularyIdentity.of(vocab_size, self.tokenizer)
        drafters = {}
        for method in methods:
            context = DrafterContext(
                vocab_size,
                pool,
                self.drafts.get(draft_of(method)),
                limits.max_batch_tokens,
                self.head,
                self.target.traits.context_len,
                self.vocabularies.get(draft_of(method)),
                server,
                vocabulary,
                new_refits(),
            )
            drafters[name_of(method)] = build(method, context) if isinstance(method, str) else method
        return drafters

    def new_pool(self, methods: Sequence[Method], limits: Limits) -> MemoryPool:
        """A pool for max_num_seqs full contexts, but at most half of the free memory."""
        target, head = self.target, self.head
        used = [self.drafts[name] for name in {draft_of(method) for method in methods} & set(self.drafts)]
        bytes_per_token = target.bytes_per_token(() if head is None else head.config.taps)
        bytes_per_token += sum(draft.traits.bytes_per_token for draft in used)
        bytes_per_token += 0 if head is None else head.bytes_per_token
        per_sequence = bytes_per_token * target.traits.context_len + self._bytes_of_source(used)
        return MemoryPool(max(1, min(per_sequence * limits.max_num_seqs, half_of_free_memory(target))))

    def _bytes_of_source(self, used: Sequence[LanguageModel]) -> int:
        """The bytes of the longest source in the caches of the target and of the draft models that are used."""
        target = self.target
        per_token = sum(model.traits.bytes_per_source_token for model in (target, *used))
        if any(draft.traits.shares_encoder for draft in used):
            per_token += target.bytes_per_source_token(keeps_encoded=True) - target.bytes_per_source_token()
        return per_token * target.traits.source_len


def half_of_free_memory(model: LanguageModel) -> int:
    """Half of the model's free memory in bytes; 4 GiB if that is unknown."""
    free = model.memory_for_cache
    return int(_CACHE_SHARE * free) if free else _UNKNOWN_MEMORY
