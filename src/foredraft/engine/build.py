"""From loaded models and settings to drafters, a policy and an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from foredraft.drafters import (
    CountedRefits,
    DrafterContext,
    MergedDrafter,
    RefitSchedule,
    TimedRefits,
    build,
    refits_of,
)
from foredraft.engine.cache import MemoryPool
from foredraft.engine.engine import Engine
from foredraft.engine.methods import MERGED, NO_DRAFT, Method, draft_of, name_of
from foredraft.engine.models import LoadedModels
from foredraft.engine.proposal import Drafter, grows_trees
from foredraft.engine.scheduler import Limits
from foredraft.engine.token_tree import TreeShape
from foredraft.heads import AnyHead
from foredraft.model import LanguageModel
from foredraft.policy import Controller, CostFile, FixedPolicy, Guard, Policy
from foredraft.remote import DraftServerAccess, VocabularyIdentity
from foredraft.sampling import AUTO
from foredraft.utils.arguments import check_numbers, check_thresholds
from foredraft.verify import Rule, Verifier, verify
from foredraft.vocabulary import VocabularyPair

_CACHE_SHARE = 0.5
_UNKNOWN_MEMORY = 4 * 2**30


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When a drafter is not used for a while (Guard). Raises ForedraftError for a value that makes no sense."""

    min_acceptance_rate: float | None = None
    max_draft_memory: int | None = None

    def __post_init__(self) -> None:
        check_thresholds(self.min_acceptance_rate, self.max_draft_memory)

    def __bool__(self) -> bool:
        return self.min_acceptance_rate is not None or self.max_draft_memory is not None


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What all engines of one LLM have in common; see LLM. Raises ForedraftError for a value that makes no sense."""

    limits: Limits
    thresholds: Thresholds
    max_speculative_tokens: int
    cache_memory: int | None = None
    seed: int | None = None
    retain: bool = True
    verification_rules: Mapping[str, Rule] = field(default_factory=dict)
    shape: TreeShape | None = None
    auto_trees: bool = False
    draft_server: DraftServerAccess | None = None
    adapt: bool = False

    def __post_init__(self) -> None:
        check_numbers(
            max_speculative_tokens=(self.max_speculative_tokens, 1),
            max_num_seqs=(self.limits.max_num_seqs, 1),
            max_num_batched_tokens=(self.limits.max_batch_tokens, 1),
            cache_memory=(self.cache_memory, 1),
            seed=(self.seed, 0),
        )


class EngineBuilder:
    """Builds engines over the same models, with the same settings and several choices of drafters.

    methods: of the drafters. speculative_tokens: a number, or "auto".
    """

    def __init__(
        self, models: LoadedModels, settings: EngineSettings, methods: Sequence[Method], speculative_tokens: int | str
    ) -> None:
        self.models = models
        self.settings = settings
        self.methods = list(methods)
        self.speculative_tokens = speculative_tokens

    def drafters(self, pool: MemoryPool | None = None) -> tuple[dict[str, Drafter], MemoryPool]:
        """New drafters by name, and the memory that they share with the target: `pool`, if there is one."""
        models, settings = self.models, self.settings
        drafters, pool = build_drafters(
            models.target,
            models.drafts,
            self.methods,
            settings.limits,
            settings.cache_memory,
            pool=pool,
            head=models.head,
            vocabularies=models.vocabularies,
            draft_server=settings.draft_server,
            tokenizer=models.tokenizer,
            new_refits=self._new_refits,
        )
        return self._with_merged(drafters), pool

    def _new_refits(self) -> RefitSchedule | None:
        """With a fixed number of draft tokens, nothing depends on measured times."""
        if not self.settings.adapt:
            return None
        return TimedRefits() if self.speculative_tokens == AUTO else CountedRefits()

    def _with_merged(self, drafters: dict[str, Drafter]) -> dict[str, Drafter]:
        """And one that merges the trees of all that grow some. Where their shape is fixed it is the first."""
        settings = self.settings
        has_trees = settings.shape is not None or settings.auto_trees
        growing = {name: drafter for name, drafter in drafters.items() if grows_trees(drafter)}
        if len(growing) < 2 or not has_trees:
            return drafters
        merged: dict[str, Drafter] = {MERGED: MergedDrafter(growing)}
        return {**drafters, **merged} if settings.shape is None else {**merged, **drafters}

    def policy(self, drafters: Mapping[str, Drafter], *, saves_costs: bool = True) -> Policy:
        """A policy that chooses among these drafters, from the costs that earlier processes measured.

        saves_costs: write what this one measures beside them.
        """
        names = list(drafters)
        if names == [NO_DRAFT]:
            return FixedPolicy(NO_DRAFT)
        settings, key = self.settings, self.models.cost_key(self.methods, names)
        if settings.draft_server is not None:
            key["draft server"] = settings.draft_server.address
        key |= {"adapt": True} if settings.adapt else {}
        growing = [name for name, drafter in drafters.items() if grows_trees(drafter)]
        store = None if self.models.is_in_memory else CostFile.of(key)
        return Controller(
            names,
            max_draft=settings.max_speculative_tokens,
            shape=settings.shape if names[0] in growing else None,
            tree_drafters=growing if settings.auto_trees else (),
            costs=store.load() if store else None,
            store=store if saves_costs else None,
        )

    def guarded(self, policy: Policy, drafters: Mapping[str, Drafter]) -> Policy:
        """The policy within the thresholds of the settings, if there are any."""
        thresholds = self.settings.thresholds
        if not thresholds:
            return policy
        return Guard(
            policy,
            drafters,
            min_acceptance_rate=thresholds.min_acceptance_rate,
            max_draft_memory=thresholds.max_draft_memory,
        )

    def engine(
        self,
        drafters: Mapping[str, Drafter],
        pool: MemoryPool,
        policy: Policy,
        *,
        target: LanguageModel | None = None,
        seed: int | None = None,
        retain: bool = False,
        verifier: Verifier = verify,
    ) -> Engine:
        """target: None takes the models' own. seed, retain, verifier: see Engine."""
        return Engine(
            target or self.models.target,
            drafters,
            pool,
            end_ids=self.models.end_ids,
            speculative_tokens=None if isinstance(self.speculative_tokens, str) else self.speculative_tokens,
            policy=policy,
            observers=[refits for refits in map(refits_of, drafters.values()) if refits is not None],
            limits=self.settings.limits,
            seed=seed,
            retain=retain,
            verifier=verifier,
            verification_rules=self.settings.verification_rules,
        )


def build_drafters(
    target: LanguageModel,
    drafts: Mapping[str, LanguageModel],
    methods: Sequence[Method],
    limits: Limits,
    cache_memory: int | None = None,
    pool: MemoryPool | None = None,
    head: AnyHead | None = None,
    vocabularies: Mapping[str, VocabularyPair] | None = None,
    draft_server: DraftServerAccess | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    new_refits: Callable[[], RefitSchedule | None] = lambda: None,
) -> tuple[dict[str, Drafter], MemoryPool]:
    """New drafters by name, and the memory that they share with the target: `pool`, if there is one.

    drafts: draft models, by draft_of. head: what was given in the place of a draft model. cache_memory: bytes; None takes what max_num_seqs full contexts need, at most half
    of the free memory. vocabularies: of draft models with another vocabulary than the target's, by draft_of. tokenizer: the target's,
    by which a draft server compares its vocabulary. new_refits: makes DrafterContext.refits.
    """
    if pool is None:
        pool = MemoryPool(cache_memory or _default_cache_memory(target, drafts, methods, limits, head))
    vocab_size, drafters = target.traits.vocab_size, {}
    vocabulary = None if draft_server is None else VocabularyIdentity.of(vocab_size, tokenizer)
    for method in methods:
        context = DrafterContext(
            vocab_size,
            pool,
            drafts.get(draft_of(method)),
            limits.max_batch_tokens,
            head,
            target.traits.context_len,
            (vocabularies or {}).get(draft_of(method)),
            draft_server,
            vocabulary,
            new_refits(),
        )
        drafters[name_of(method)] = build(method, context) if isinstance(method, str) else method
    return drafters, pool


def _default_cache_memory(
    target: LanguageModel,
    drafts: Mapping[str, LanguageModel],
    methods: Sequence[Method],
    limits: Limits,
    head: AnyHead | None,
) -> int:
    """Bytes for max_num_seqs full contexts, but at most half of the memory that is free."""
    used = {draft_of(method) for method in methods} & set(drafts)
    bytes_per_token = target.bytes_per_token(() if head is None else head.config.taps)
    bytes_per_token += sum(drafts[name].traits.bytes_per_token for name in used)
    bytes_per_token += 0 if head is None else head.bytes_per_token
    needed = (
        bytes_per_token * target.traits.context_len + _bytes_of_source(target, drafts, used)
    ) * limits.max_num_seqs
    return max(1, min(needed, half_of_free_memory(target)))


def _bytes_of_source(target: LanguageModel, drafts: Mapping[str, LanguageModel], used: set[str]) -> int:
    """Of the longest source, in the target's cache and in those of the drafts that are used."""
    per_token = [model.traits.bytes_per_source_token for model in (target, *(drafts[name] for name in used))]
    kept = any(drafts[name].traits.shares_encoder for name in used)
    encoded = target.bytes_per_source_token(keeps_encoded=True) - target.bytes_per_source_token() if kept else 0
    return (sum(per_token) + encoded) * target.traits.source_len


def half_of_free_memory(model: LanguageModel) -> int:
    """Bytes; 4 GiB where the free memory is not known."""
    free = model.memory_for_cache
    return int(_CACHE_SHARE * free) if free else _UNKNOWN_MEMORY
