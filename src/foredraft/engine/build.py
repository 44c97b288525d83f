"""Builds drafters, a policy and an engine from loaded models and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from foredraft.drafters import (
    CountedRefits,
    MergedDrafter,
    RefitSchedule,
    TimedRefits,
    refits_of,
)
from foredraft.engine.draft_sources import DraftSources
from foredraft.engine.engine import Engine
from foredraft.engine.hybrids import hybrid_of, with_hybrid
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.methods import HYBRID, MERGED, NO_DRAFT, Method
from foredraft.engine.models import LoadedModels
from foredraft.engine.proposal import Drafter, grows_trees
from foredraft.engine.scheduler import Limits
from foredraft.engine.token_tree import TreeShape
from foredraft.errors import ForedraftError, shown
from foredraft.model import LanguageModel
from foredraft.policy import Controller, FixedPolicy, Guard, Policy, StateFile
from foredraft.remote import DraftServerAccess
from foredraft.sampling import AUTO
from foredraft.utils.arguments import check_numbers, check_thresholds
from foredraft.verify import Rule, Verifier, verify


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The thresholds of Guard, which stops using a drafter for a while. Raises ForedraftError for an invalid value."""

    min_acceptance_rate: float | None = None
    max_draft_memory: int | None = None

    def __post_init__(self) -> None:
        check_thresholds(self.min_acceptance_rate, self.max_draft_memory)

    def __bool__(self) -> bool:
        return self.min_acceptance_rate is not None or self.max_draft_memory is not None


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings that all engines of one LLM share; see LLM. Raises ForedraftError for an invalid value."""

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
        if not isinstance(self.retain, bool):
            raise ForedraftError(f"enable_prefix_caching must be true or false, not {shown(self.retain)}")


class EngineBuilder:
    """Builds engines over the same models with the same settings; their drafters may differ.

    methods: the drafters. speculative_tokens: a number, or "auto".
    """

    def __init__(
        self, models: LoadedModels, settings: EngineSettings, methods: Sequence[Method], speculative_tokens: int | str
    ) -> None:
        self.models = models
        self.settings = settings
        self.methods = list(methods)
        self.speculative_tokens = speculative_tokens

    def drafters(self, pool: MemoryPool | None = None) -> tuple[dict[str, Drafter], MemoryPool]:
        """New drafters by name, and the memory that they share with the target: `pool`, if it is given."""
        sources, settings = self._draft_sources(), self.settings
        if pool is None and settings.cache_memory is not None:
            pool = MemoryPool(settings.cache_memory)
        elif pool is None:
            pool = sources.new_pool(self.methods, settings.limits)
        drafters = sources.drafters(self.methods, settings.limits, pool, self._new_refits)
        return self._with_combined(drafters), pool

    def _draft_sources(self) -> DraftSources:
        models = self.models
        return DraftSources(
            models.target, models.drafts, models.head, models.vocabularies, models.tokenizer, self.settings.draft_server
        )

    def _new_refits(self) -> RefitSchedule | None:
        """The schedule for drafters that adapt. With a fixed number of draft tokens it counts steps, so as not to depend on times."""
        if not self.settings.adapt:
            return None
        return TimedRefits() if self.speculative_tokens == AUTO else CountedRefits()

    def _with_combined(self, drafters: dict[str, Drafter]) -> dict[str, Drafter]:
        """Add a drafter that combines others. If "auto" chooses the drafts, it asks a lookup first, and the model elsewhere. Where there is
        no such pair, or the shape of trees is fixed, it merges the trees of all drafters that grow them; it comes first if the shape is
        fixed."""
        settings = self.settings
        if self.speculative_tokens == AUTO and settings.shape is None:
            drafters = with_hybrid(drafters)
            if HYBRID in drafters:
                return drafters
        if settings.shape is None and not settings.auto_trees:
            return drafters
        growing = {name: drafter for name, drafter in drafters.items() if grows_trees(drafter)}
        if len(growing) < 2:
            return drafters
        merged: dict[str, Drafter] = {MERGED: MergedDrafter(growing)}
        return {**drafters, **merged} if settings.shape is None else {**merged, **drafters}

    def policy(self, drafters: Mapping[str, Drafter], *, saves_state: bool = True) -> Policy:
        """A policy that chooses among these drafters, starting from what earlier processes measured.

        saves_state: save what this policy measures too.
        """
        names = list(drafters)
        if names == [NO_DRAFT]:
            return FixedPolicy(NO_DRAFT)
        settings, key = self.settings, self.models.state_key(self.methods, names)
        if settings.draft_server is not None:
            key["draft server"] = settings.draft_server.address
        key |= {"adapt": True} if settings.adapt else {}
        growing = [name for name, drafter in drafters.items() if grows_trees(drafter)]
        store = None if self.models.is_in_memory else StateFile.of(key)
        return Controller(
            names,
            max_draft=settings.max_speculative_tokens,
            shape=settings.shape if names[0] in growing else None,
            tree_drafters=growing if settings.auto_trees else (),
            hybrid=hybrid_of(names),
            state=store.load() if store else None,
            store=store if saves_state else None,
        )

    def guarded(self, policy: Policy, drafters: Mapping[str, Drafter]) -> Policy:
        """The policy, wrapped in a Guard if the settings have thresholds."""
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
        """A new engine. target: None takes that of the loaded models. seed, retain, verifier: see Engine."""
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
