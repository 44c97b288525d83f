"""The engine. One step proposes, scores, verifies and commits, for a whole ragged batch.

Plain decoding is a step with zero draft tokens, prefill is a step with a long unread history; there is no second loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

import torch
from torch import Tensor

from foredraft.engine.checks import check_memory, check_params, check_prompt, check_source
from foredraft.engine.drafter_group import DrafterGroup, Drafting, Drafts
from foredraft.engine.faults import DrafterFaults
from foredraft.engine.logprobs import logprobs_of, record_prompt
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import DeviceDraft, Drafter, Parents, Proposal
from foredraft.engine.scheduler import Limits, Scheduler
from foredraft.engine.sequence import StopRule, TokenSequence
from foredraft.engine.sources import NO_SOURCE, Source
from foredraft.engine.stats import PrefixStats, SpeculationStats
from foredraft.engine.step import Attempt, Observer, Outcome, ScheduledSequence, Step, StepTimer, outcomes_of
from foredraft.model import LanguageModel, Read, read_with_draft
from foredraft.model.placeholders import LaunchedRead
from foredraft.policy import FixedPolicy, Policy, SafePolicy
from foredraft.sampling import (
    NO_CHECKPOINT_RULES,
    VERIFICATIONS,
    CheckpointRules,
    Constraint,
    Sampler,
    SamplingParams,
)
from foredraft.utils.interrupts import DeferredInterrupt
from foredraft.utils.isolation import Shield, run_isolated
from foredraft.verify import NO_RULES, Rule, Verifier, verify

NEAR_TIE = 1e-4


class Engine:
    """Continuous batching with ragged acceptance over one target and its drafters.

    model: the target. drafter: a drafter, or several by name. pool: the memory for all keys and values, those of drafters
    included. speculative_tokens: the default number of draft tokens; None leaves it to the policy. end_ids: the ids that
    end a text unless ignored. policy: chooses the drafter and the number of tokens; by default the first drafter, and as many as the
    request wants. observers: are shown every step. seed: for the noise of unseeded requests. retain: keep the keys and values of
    ended sequences (of drafters too) for later histories with the same prefix, until the memory is needed. verifier: decides on the
    draft tokens; only tests of the tests replace it. verification_rules: for requests that name them, besides the built-in ones.

    An exception in a step ends only the sequence that caused it: see `step`. Raises DrafterError for an object that is not a
    drafter.
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
        self.stats = SpeculationStats()
        self.observers = list(observers)
        self.in_use = threading.Lock()  # held by the AsyncLLM that runs it, if there is one
        self._drafter_group = DrafterGroup(
            drafter if isinstance(drafter, Mapping) else {type(drafter).__name__: drafter}
        )
        self.cache = model.new_cache(pool, self._drafter_group.taps, keeps_encoded=self._drafter_group.reads_encoder)
        self._policy = SafePolicy(policy or FixedPolicy(self._drafter_group.names[0]), self._drafter_group.names)
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
        """How much of the histories the target found in its prefix cache."""
        return self._scheduler.prefix_stats

    @property
    def draft_prefix_stats(self) -> PrefixStats:
        """The same for the drafters that run a model."""
        return self._drafter_group.prefix_stats

    @property
    def num_preemptions(self) -> int:
        """Of all sequences so far."""
        return self._scheduler.num_preemptions

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
        source: Source = NO_SOURCE,
        stop_rule: StopRule | None = None,
        bad_words: Sequence[Sequence[int]] = (),
        constraint: Constraint | None = None,
        rules: CheckpointRules = NO_CHECKPOINT_RULES,
        child: int = 0,
        wait_for: TokenSequence | None = None,
        client: str = "",
        priority: int = 0,
    ) -> TokenSequence:
        """Queue one text. prompt, source: as LanguageModel.inputs_for returns them. params: resolved against the checkpoint. child:
        the index of this text among the n of its request. constraint: made from structured_outputs for this text alone. rules: those
        of the checkpoint. client, priority: see TokenSequence.

        Raises ForedraftError for a prompt that cannot be run.
        """
        max_len = self.check(prompt, params, source)
        end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._end_ids)
        sampler = Sampler(
            params,
            prompt,
            self._generator,
            child=child,
            end_ids=sorted(self._end_ids | end_ids),
            bad_words=[word for word in bad_words if max(word) < self.model.traits.vocab_size],
            constraint=constraint,
            rules=rules.within(self.model.traits.vocab_size),
        )
        sequence = TokenSequence(
            seq_id=next(self._seq_ids),
            tokens=list(prompt),
            sampler=sampler,
            max_len=max_len,
            speculative_tokens=self._draft_len_of(params),
            source=source,
            end_ids=end_ids,
            stop_rule=stop_rule,
            wait_for=wait_for,
            client=client,
            priority=priority,
        )
        self._scheduler.add(sequence)
        return sequence

    def step(self, meanwhile: Callable[[], None] | None = None) -> list[TokenSequence]:
        """Advance every scheduled sequence; return those that got tokens or ended.

        meanwhile: called once the target's pass has been launched on its device, which may still be computing. It may read sequences,
        but must neither end nor add any, and must not raise.

        An error that a sequence causes ends that sequence, as it would have under plain decoding: a pass or a verification that
        raises is repeated without drafts, for smaller and smaller parts of the batch. Errors of a drafter, the policy or an observer
        end no sequence. Ctrl-C takes effect after the step.
        """
        with DeferredInterrupt():
            return self._step(meanwhile)

    def _step(self, meanwhile: Callable[[], None] | None) -> list[TokenSequence]:
        timer = StepTimer()
        changed: list[TokenSequence] = []

        def fail(sequence: TokenSequence, error: Exception) -> None:
            self._fail(sequence, error)
            changed.append(sequence)

        scheduled = self._scheduler.schedule(fail)
        if not (scheduled or changed) and self.has_work:
            raise RuntimeError("nothing can be scheduled: the cache memory is not held by any running sequence")
        attempts, unexplained = run_isolated(
            scheduled,
            partial(self._attempt, timer, meanwhile),
            self._attempt_without_drafts,
            lambda item, error: fail(item.sequence, error),
        )
        if unexplained is not None:
            self._suspect_drafters(scheduled, unexplained)
        for attempt in attempts:
            self._commit(attempt)
            changed += [item.sequence for item in attempt.step.scoring]
        return changed

    def _attempt(
        self, timer: StepTimer, meanwhile: Callable[[], None] | None, scheduled: Sequence[ScheduledSequence]
    ) -> Attempt:
        """Propose, score, verify. This changes no history, so it may be repeated."""
        scoring = [item for item in scheduled if item.scores]
        drafting = self._drafter_group.begin(scoring, self.cache)
        timer.lap()
        launched = self._launch(scheduled, drafting.on_device)
        read_time = timer.lap()
        drafts = self._collect(drafting)
        timer.leave_out(drafts.check_time)
        timer.lap()
        logits = self._score(scheduled, drafts.proposal, launched)
        if meanwhile is not None:
            meanwhile()
        read_time += timer.lap()
        outcomes = self._verify(scoring, drafts.proposal, logits) if scoring else []
        step = Step(scheduled, scoring, drafts.proposal, outcomes, drafts.times, read_time, timer.lap())
        return Attempt(step, timer)

    def _commit(self, attempt: Attempt) -> None:
        """Append the new tokens to the texts, and show the step to the policy and the observers."""
        num_kept = [self._grow(*pair) for pair in zip(attempt.step.scoring, attempt.step.outcomes, strict=True)]
        step = attempt.committed(num_kept)
        self._policy.observe(step)
        for observer in list(self.observers):
            self._shield.call(observer, partial(observer.observe, step), None)

    def _attempt_without_drafts(self, scheduled: Sequence[ScheduledSequence]) -> Attempt:
        """Decode plainly, from the state of the cache before the step."""
        timer = StepTimer()
        for item in scheduled:
            self.cache.keep_prefix_of(item.sequence.seq_id, item.sequence.tokens, at_most=item.num_read)
        return self._attempt(timer, None, [replace(item, max_draft=0) for item in scheduled])

    def _suspect_drafters(self, scheduled: Sequence[ScheduledSequence], error: Exception) -> None:
        """A step failed with drafts but not without them, so do not use the drafters that made them for a while."""
        suspects = {item.drafter: error for item in scheduled if item.drafter and item.max_draft}
        self._faults.cool_down(suspects, self._running_ids)

    def _fail(self, sequence: TokenSequence, error: Exception) -> None:
        """End one sequence with the error that it caused."""
        sequence.fail(error)
        self._release(sequence)

    def abort(self, sequence: TokenSequence) -> None:
        """End a sequence between steps and free what it holds. Does nothing if it has ended."""
        if sequence.is_finished:
            return
        with DeferredInterrupt():
            sequence.finish("abort")
            self._release(sequence)

    def preempt(self, sequence: TokenSequence) -> None:
        """Free the memory of a running sequence, which starts again later; its text is not affected."""
        self._scheduler.preempt(sequence)

    def drop_retained(self) -> None:
        """Free the keys and values that are kept for later prompts."""
        self.cache.drop_retained()
        self._drafter_group.drop_retained()

    def check(self, prompt: Sequence[int], params: SamplingParams, source: Source = NO_SOURCE) -> int:
        """How long the text may become, prompt included. Raises ForedraftError for a request that cannot be run."""
        traits = self.model.traits
        check_source(source, params, traits.vocab_size, traits.source_len)
        check_prompt(prompt, params, traits.vocab_size, traits.context_len)
        check_params(params, traits.vocab_size, self._verifications)
        wanted = traits.context_len if params.max_tokens is None else len(prompt) + params.max_tokens
        max_len = min(wanted, traits.context_len)
        check_memory(len(source) + max_len, self.cache.bytes_for(max_len, len(source)), self.pool.total)
        return max_len

    def _draft_len_of(self, params: SamplingParams) -> int | None:
        """The most draft tokens of a step for this request; None: the policy decides."""
        if params.speculative_tokens is None:
            return self._speculative_tokens
        return None if isinstance(params.speculative_tokens, str) else params.speculative_tokens

    def _launch(self, scheduled: Sequence[ScheduledSequence], draft: DeviceDraft | None) -> LaunchedRead | None:
        """Start the target's pass over a draft that is not known yet."""
        if draft is None:
            return None
        reads = self._reads(scheduled, draft.rows, [None] * len(draft.rows))
        return self.model.launch_read(reads, self.cache, draft.ids)

    def _collect(self, drafting: Drafting) -> Drafts:
        drafts = self._drafter_group.collect(drafting, self.model.traits.vocab_size)
        self._faults.cool_down(drafts.failures, self._running_ids)
        return drafts

    def _reads(
        self, scheduled: Sequence[ScheduledSequence], draft_ids: Sequence[Sequence[int]], parents: Parents
    ) -> list[Read]:
        """What the target's pass reads. draft_ids, parents: a row for each sequence that scores"""
        reads = []
        drafts = zip(draft_ids, parents, strict=True)
        for item in scheduled:
            start = self.cache.num_held(item.sequence.seq_id)
            tokens = item.sequence.tokens[start : start + item.num_unread]
            read = Read(item.sequence.seq_id, tokens, 0)
            if item.scores:
                read = read_with_draft(read, *next(drafts))
            if self._wants_prompt_logprobs(item.sequence):
                read = replace(read, num_logits=len(read.tokens))
            reads.append(read)
        return reads

    def _score(
        self, scheduled: Sequence[ScheduledSequence], proposal: Proposal, launched: LaunchedRead | None
    ) -> list[Tensor]:
        """Run one target pass, unless the launched one serves. -> for each sequence that scores, the logits [lens + 1, V] after its
        history and each draft token"""
        reads = self._reads(scheduled, proposal.draft_ids, proposal.draft_parents)
        if not reads:
            return []
        logits = self.model.read(reads, self.cache, launched)
        # views that are not needed are not made: each costs tens of microseconds after a pass that left nothing in the caches
        parts = [logits] if len(reads) == 1 else torch.split(logits, [read.num_logits for read in reads])
        for item, part in zip(scheduled, parts, strict=True):
            if self._wants_prompt_logprobs(item.sequence):
                record_prompt(item.sequence, item.num_read, part)
        lens = iter(proposal.draft_ids)
        return [_last(part, len(next(lens)) + 1) for item, part in zip(scheduled, parts, strict=True) if item.scores]

    @staticmethod
    def _wants_prompt_logprobs(sequence: TokenSequence) -> bool:
        return sequence.sampler.params.prompt_logprobs is not None and sequence.num_output == 0

    def _verify(self, scoring: list[ScheduledSequence], proposal: Proposal, logits: list[Tensor]) -> list[Outcome]:
        samplers = [item.sequence.sampler for item in scoring]
        histories = [item.sequence.tokens for item in scoring]
        rows = logits[0] if len(logits) == 1 else torch.cat(logits)
        verdict = self._verifier(rows, proposal, samplers, histories, near_tie=self._near_tie)
        return outcomes_of(verdict, proposal, logits)

    def _grow(self, item: ScheduledSequence, outcome: Outcome) -> int:
        """Append an outcome to one text; an error ends that text. -> how many of the outcome's tokens the text kept"""
        length = len(item.sequence.tokens)
        try:
            self._keep(item.sequence, outcome)
        except Exception as error:
            self._fail(item.sequence, error)
        return len(item.sequence.tokens) - length

    def _keep(self, sequence: TokenSequence, outcome: Outcome) -> None:
        failed = outcome.first_failed
        num_kept = sequence.commit(outcome.new_ids[:failed], outcome.num_evaluated, has_own=failed is None)
        if failed is not None and not sequence.is_finished:
            # plain decoding would have reached this row, and failed there
            sequence.finish("error", outcome.failed[failed])
        num_top = sequence.sampler.params.logprobs
        if num_top is not None:
            sequence.logprobs += logprobs_of(outcome.path_logits[:num_kept], outcome.new_ids[:num_kept], num_top)
        counts = {
            "num_drafted": outcome.num_drafted,
            "num_accepted": outcome.num_accepted,
            "num_kept": num_kept,
            "depth": outcome.depth,
            "num_evaluated": outcome.num_evaluated,
            "near_ties": sum(outcome.near_ties[:num_kept]),
        }
        for stats in (self.stats, sequence.stats):
            stats.record(**counts)
        self.cache.keep_prefix_of(sequence.seq_id, sequence.tokens, at_most=len(sequence.tokens) - 1)
        if sequence.is_finished:
            self._release(sequence)

    def _release(self, sequence: TokenSequence) -> None:
        """Free an ended sequence, or retain its keys and values for others; an aborted one may be useful to them too."""
        try:
            if self._retain and sequence.sampler.params.prefix_caching and sequence.error is None:
                self.cache.retain(sequence.seq_id, sequence.tokens)
                self._drafter_group.retain(sequence.seq_id, sequence.tokens)
            else:
                self.cache.drop([sequence.seq_id])
                self._drafter_group.forget([sequence.seq_id])
        finally:
            self._scheduler.remove(sequence)  # last: a thread that sees no work left finds all memory freed


def _last(rows: Tensor, number: int) -> Tensor:
    return rows if rows.shape[0] == number else rows[-number:]
