"""One step is propose, score, verify, commit, for a whole ragged batch.

Plain decoding is the step with zero draft tokens, prefill the step with a long unread history; there is no second loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, count, pairwise

import torch
from torch import Tensor

from foredraft.engine.cache import MemoryPool
from foredraft.engine.drafter_group import DrafterGroup
from foredraft.engine.faults import DrafterFaults
from foredraft.engine.logprobs import logprobs_of, record_prompt
from foredraft.engine.proposal import Drafter, Proposal
from foredraft.engine.scheduler import Limits, Scheduler
from foredraft.engine.sequence import StopRule, TokenSequence
from foredraft.engine.stats import PrefixStats, SpeculationStats
from foredraft.engine.step import Attempt, Observer, Outcome, ScheduledSequence, outcomes_of
from foredraft.errors import ForedraftError, PromptLengthError, shown
from foredraft.model import LanguageModel, Read
from foredraft.policy import FixedPolicy, Policy, SafePolicy
from foredraft.sampling import VERIFICATIONS, Constraint, Sampler, SamplingParams
from foredraft.utils.isolation import Shield, together_or_apart
from foredraft.verify import NO_RULES, Rule, Verifier, verify

NEAR_TIE = 1e-4


class Engine:
    """Continuous batching with ragged acceptance over one target and its drafters.

    model: the target. drafter: anything that proposes, or several by name. pool: the memory for keys and values, drafts'
    included. speculative_tokens: the default number of draft tokens; None leaves it to the policy. end_ids: the ids that
    end a text unless ignored. policy: whom to ask and for how much; by default the first drafter for what a request wants.
    observers: are shown every step. seed: of the noise of unseeded requests. retain: keep ended sequences' keys and
    values, drafts' too, for histories that begin like them, until the room is needed. verifier: what decides on the draft
    tokens; another one only to test a test. verification_rules: for requests that name them, beside those that are built in.

    An exception in a step ends the sequence that caused it and no other: see `step`. Raises DrafterError for an object that
    is no drafter.
    """

    def __init__(
        self,
        model: LanguageModel,
        drafter: Drafter | Mapping[str, Drafter],
        pool: MemoryPool,
        *,
        end_ids: Sequence[int] = (),
        speculative_tokens: int | None = 4,
        policy: Policy | None = None,
        observers: Sequence[Observer] = (),
        limits: Limits | None = None,
        seed: int | None = None,
        retain: bool = True,
        verifier: Verifier = verify,
        verification_rules: Mapping[str, Rule] = NO_RULES,
    ) -> None:
        self.model = model
        self.pool = pool
        self.cache = model.new_cache(pool)
        self.stats = SpeculationStats()
        self.observers = list(observers)
        self._drafter_group = DrafterGroup(
            drafter if isinstance(drafter, Mapping) else {type(drafter).__name__: drafter}
        )
        self._policy = SafePolicy(policy or FixedPolicy(self._drafter_group.names[0]))
        # a pruned checkpoint may name ids that its logits do not have
        self._end_ids = frozenset(i for i in end_ids if i < model.traits.vocab_size)
        self._speculative_tokens = speculative_tokens
        self._scheduler = Scheduler(self.cache, self._drafter_group, self._policy, limits or Limits(), retain=retain)
        self._generator = torch.Generator()
        self._generator.manual_seed(seed) if seed is not None else self._generator.seed()
        self._retain = retain
        self._verifier = partial(verify, rules=verification_rules) if verifier is verify else verifier
        self._verifications = (*VERIFICATIONS, *verification_rules)
        self._seq_ids = count()
        self._shield = Shield()
        self._faults = DrafterFaults(self._drafter_group, self._policy)
        self._near_tie = 0.0 if model.traits.row_exact else NEAR_TIE

    @property
    def end_ids(self) -> frozenset[int]:
        """The ids that end a text."""
        return self._end_ids

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def prefix_stats(self) -> PrefixStats:
        """How much of their histories the target found read already."""
        return self._scheduler.prefix_stats

    @property
    def draft_prefix_stats(self) -> PrefixStats:
        """The same of the drafters that read with a model."""
        return self._drafter_group.prefix_stats

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def _running_ids(self) -> list[int]:
        return [sequence.seq_id for sequence in self._scheduler.running]

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        stop_rule: StopRule | None = None,
        bad_words: Sequence[Sequence[int]] = (),
        constraint: Constraint | None = None,
        child: int = 0,
        wait_for: TokenSequence | None = None,
        client: str = "",
        priority: int = 0,
    ) -> TokenSequence:
        """Queue one text. params: resolved against the checkpoint. child: which of the n texts of its request. constraint:
        what structured_outputs come to, for this text alone. client, priority: see TokenSequence.

        Raises ForedraftError for a prompt that cannot be run.
        """
        max_len = self.check(prompt, params)
        end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._end_ids)
        masked = self._end_ids | end_ids
        bad_words = [word for word in bad_words if max(word) < self.model.traits.vocab_size]
        wanted = params.speculative_tokens
        sampler = Sampler(
            params,
            prompt,
            self._generator,
            child=child,
            end_ids=sorted(masked),
            bad_words=bad_words,
            constraint=constraint,
        )
        sequence = TokenSequence(
            seq_id=next(self._seq_ids),
            tokens=list(prompt),
            sampler=sampler,
            max_len=max_len,
            speculative_tokens=self._speculative_tokens if wanted is None else _as_draft_len(wanted),
            end_ids=end_ids,
            stop_rule=stop_rule,
            wait_for=wait_for,
            client=client,
            priority=priority,
        )
        self._scheduler.add(sequence)
        return sequence

    def step(self, meanwhile: Callable[[], None] | None = None) -> list[TokenSequence]:
        """Advance every scheduled sequence; give those that got tokens or ended.

        meanwhile: called when the target's pass was handed to its device; what a device does by itself waits for nobody.
        It may read sequences, must neither end nor add any, and must not raise.

        What a sequence raises ends that sequence, with the error that plain decoding would have met: a pass or a
        verification that raises is repeated without drafts, for smaller and smaller parts of the batch. What a drafter, the
        policy or an observer raises ends none.
        """
        began = time.perf_counter()
        changed: list[TokenSequence] = []

        def fail(sequence: TokenSequence, error: Exception) -> None:
            self._fail(sequence, error)
            changed.append(sequence)

        scheduled = self._scheduler.schedule(fail)
        if not (scheduled or changed) and self.has_work:
            raise RuntimeError("nothing can be scheduled: the cache memory is taken by nobody who runs")
        attempts, unexplained = together_or_apart(
            scheduled,
            partial(self._attempt, began, meanwhile),
            self._attempt_without_drafts,
            lambda item, error: fail(item.sequence, error),
        )
        if unexplained is not None:  # it did not happen without drafts: whoever makes them is suspected
            suspects = {item.drafter: unexplained for item in scheduled if item.drafter and item.max_draft}
            self._faults.cool_down(suspects, self._running_ids)
        for attempt in attempts:
            num_kept = [
                self._commit(item, outcome) for item, outcome in zip(attempt.scoring, attempt.outcomes, strict=True)
            ]
            self._report(attempt, num_kept)
            changed += [item.sequence for item in attempt.scoring]
        return changed

    def _attempt(
        self, began: float, meanwhile: Callable[[], None] | None, scheduled: Sequence[ScheduledSequence]
    ) -> Attempt:
        """Propose, score, verify. No history changes, so it may be repeated."""
        scoring = [item for item in scheduled if item.scores]
        drafts = self._drafter_group.propose(scoring, self.model.traits.vocab_size)
        self._faults.cool_down(drafts.failures, self._running_ids)
        drafted = time.perf_counter()
        logits = self._score(scheduled, drafts.proposal)
        if meanwhile is not None:
            meanwhile()
        scored = time.perf_counter()
        outcomes = self._verify(scoring, drafts.proposal, logits) if scoring else []
        verified = time.perf_counter()
        return Attempt(
            scheduled, scoring, drafts.proposal, outcomes, drafts.times, scored - drafted, verified - scored, began
        )

    def _attempt_without_drafts(self, scheduled: Sequence[ScheduledSequence]) -> Attempt:
        """As plain decoding, from where the cache stood before the step."""
        began = time.perf_counter()
        for item in scheduled:
            self.cache.keep_prefix_of(item.sequence.seq_id, item.sequence.tokens, at_most=item.num_read)
        return self._attempt(began, None, [replace(item, max_draft=0) for item in scheduled])

    def _report(self, attempt: Attempt, num_kept: list[int]) -> None:
        """Tell those who look on."""
        step = attempt.committed(num_kept)
        self._policy.observe(step)
        for observer in list(self.observers):
            self._shield.call(observer, partial(observer.observe, step), None)

    def _fail(self, sequence: TokenSequence, error: Exception) -> None:
        """End one sequence with what it raised."""
        sequence.fail(error)
        self._release(sequence)

    def abort(self, sequence: TokenSequence) -> None:
        """End a sequence at any moment between steps and give back what it holds. Harmless if it has ended."""
        if not sequence.is_finished:
            sequence.finish("abort")
            self._release(sequence)

    def preempt(self, sequence: TokenSequence) -> None:
        """Make a running sequence give up its memory and start again later; its text is not affected."""
        self._scheduler.preempt(sequence)

    def drop_retained(self) -> None:
        """Give back the keys and values that are kept for later prompts."""
        self.cache.drop_retained()
        self._drafter_group.drop_retained()

    def check(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """How long the text may become, prompt included. Raises ForedraftError for what cannot be run."""
        vocab_size, context_len = self.model.traits.vocab_size, self.model.traits.context_len
        if not prompt:
            raise ForedraftError("the prompt is empty: give at least one token")
        bad = next((token for token in prompt if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise ForedraftError(f"the prompt holds token id {shown(bad)}: ids go from 0 to {vocab_size - 1}")
        most = context_len if params.max_tokens == 0 else context_len - 1
        if len(prompt) > most:
            raise PromptLengthError(
                f"the prompt has {len(prompt)} tokens and the context holds {context_len}: give at most {most}"
                + (", so that one can be written" if most < context_len else "")
            )
        self._refuse_unknown_ids(params, vocab_size)
        if params.verification is not None and params.verification not in self._verifications:
            raise ForedraftError(
                f"verification must be one of {', '.join(self._verifications)}, not {shown(params.verification)}"
            )
        wanted = context_len if params.max_tokens is None else len(prompt) + params.max_tokens
        max_len = min(wanted, context_len)
        if self.cache.bytes_for(max_len) > self.pool.total:
            raise ForedraftError(
                f"{max_len} tokens take {self.cache.bytes_for(max_len) / 2**20:.0f} MiB of cache and the budget is "
                f"{self.pool.total / 2**20:.0f} MiB: raise cache_memory or lower max_tokens"
            )
        return max_len

    @staticmethod
    def _refuse_unknown_ids(params: SamplingParams, vocab_size: int) -> None:
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            ids = getattr(params, name) or ()
            bad = next((token for token in ids if not 0 <= token < vocab_size), None)
            if bad is not None:
                raise ForedraftError(f"{name} holds token id {bad}: ids go from 0 to {vocab_size - 1}")

    def _score(self, scheduled: Sequence[ScheduledSequence], proposal: Proposal) -> list[Tensor]:
        """One target pass. -> for each scoring work, the rows [lens + 1, V] behind its history and its draft tokens."""
        reads, starts = [], []
        drafts = iter(proposal.draft_ids)
        for item in scheduled:
            starts.append(self.cache.num_held(item.sequence.seq_id))
            tokens = item.sequence.tokens[starts[-1] : starts[-1] + item.num_unread]
            num_logits = 0
            if item.scores:
                draft_ids = next(drafts)
                tokens, num_logits = tokens + draft_ids, len(draft_ids) + 1
            if self._wants_prompt_logprobs(item.sequence):
                num_logits = len(tokens)
            reads.append(Read(item.sequence.seq_id, tokens, num_logits))
        if not reads:
            return []
        logits = self.model.read(reads, self.cache)
        ends = accumulate((read.num_logits for read in reads), initial=0)
        parts = [logits[a:b] for a, b in pairwise(ends)]
        for item, start, part in zip(scheduled, starts, parts, strict=True):
            if self._wants_prompt_logprobs(item.sequence):
                record_prompt(item.sequence, start, part)
        drafts = iter(proposal.draft_ids)
        return [part[-(len(next(drafts)) + 1) :] for item, part in zip(scheduled, parts, strict=True) if item.scores]

    @staticmethod
    def _wants_prompt_logprobs(sequence: TokenSequence) -> bool:
        return sequence.sampler.params.prompt_logprobs is not None and sequence.num_output == 0

    def _verify(self, scoring: list[ScheduledSequence], proposal: Proposal, logits: list[Tensor]) -> list[Outcome]:
        samplers = [item.sequence.sampler for item in scoring]
        histories = [item.sequence.tokens for item in scoring]
        verdict = self._verifier(torch.cat(logits), proposal, samplers, histories, near_tie=self._near_tie)
        return outcomes_of(verdict, proposal, logits)

    def _commit(self, item: ScheduledSequence, outcome: Outcome) -> int:
        """-> how many of the outcome's tokens the text kept"""
        length = len(item.sequence.tokens)
        try:
            self._grow(item, outcome)
        except Exception as error:
            self._fail(item.sequence, error)
        return len(item.sequence.tokens) - length

    def _grow(self, item: ScheduledSequence, outcome: Outcome) -> None:
        sequence, new_ids = item.sequence, outcome.new_ids
        num_accepted = outcome.num_accepted
        failed = outcome.first_failed
        num_kept = sequence.commit(new_ids[:failed], outcome.num_drafted, has_own=failed is None)
        if failed is not None and not sequence.is_finished:
            # plain decoding would have come to this row, and failed there
            sequence.finish("error", outcome.failed[failed])
        num_top = sequence.sampler.params.logprobs
        if num_top is not None:
            sequence.logprobs += logprobs_of(outcome.logits[:num_kept], new_ids[:num_kept], num_top)
        num_ties = sum(outcome.near_ties[:num_kept])
        for stats in (self.stats, sequence.stats):
            stats.record(
                num_drafted=outcome.num_drafted, num_accepted=num_accepted, num_kept=num_kept, near_ties=num_ties
            )
        self.cache.keep_prefix_of(sequence.seq_id, sequence.tokens, at_most=len(sequence.tokens) - 1)
        if sequence.is_finished:
            self._release(sequence)

    def _release(self, sequence: TokenSequence) -> None:
        """What was read for it may serve others, also if nobody waits for the rest of its text."""
        self._scheduler.remove(sequence)
        if self._retain and sequence.sampler.params.prefix_caching and sequence.error is None:
            self.cache.retain(sequence.seq_id, sequence.tokens)
            self._drafter_group.retain(sequence.seq_id, sequence.tokens)
        else:
            self.cache.drop([sequence.seq_id])
            self._drafter_group.forget([sequence.seq_id])


def _as_draft_len(wanted: int | str) -> int | None:
    """None: as many as pay."""
    return None if isinstance(wanted, str) else wanted
