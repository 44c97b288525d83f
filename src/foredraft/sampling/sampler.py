"""Chooses tokens from logits for a batch of rows, each with its own request's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from foredraft.errors import ForedraftError, message_of, one_line
from foredraft.kernels import Adjustments, DrawSpec
from foredraft.sampling.constraint import Bits, Constraint, refuse
from foredraft.sampling.counts import TokenCounts
from foredraft.sampling.devices import to_device
from foredraft.sampling.noise import shared_scores
from foredraft.sampling.params import LogitsProcessor, SamplingParams
from foredraft.sampling.pending import Pending
from foredraft.sampling.rules import NO_CHECKPOINT_RULES, CheckpointRules
from foredraft.sampling.search import argmax_rows, kernels_for, top_rows, top_two_on_device
from foredraft.sampling.spec import Noise, SamplingSpec
from foredraft.sampling.token_probs import TokenProbs, inverse_cdf, token_probs_under

_NO_IDS, _NO_BIASES = torch.empty(0, dtype=torch.int64), torch.empty(0)
_ALWAYS = 1 << 62
"""More tokens than any text has."""

_UNIFORMS_AT_ONCE = 64

NOT_A_DISTRIBUTION = "the model returned NaN logits: its weights or its dtype are unusable"


class _BanAfter(NamedTuple):
    """A token that is banned wherever the text, from position `start` on, ends with `prefix`."""

    prefix: tuple[int, ...]
    token: int
    start: int


class Sampler:
    """The parameters, token counts and noise that choose one text's tokens.

    spec: the part of it that is plain data. has_logits_processors: whether logits are changed by more than a constraint, which only
    masks some. params: resolved (no None among temperature, top_p, top_k, min_p, repetition_penalty). prompt: prompt ids.
    end_ids: ids masked until min_tokens were generated. bad_words: their token sequences, whose beginnings in the prompt do not count
    (those of the rules do). rules: those of the checkpoint. child: the index of this text among the n of its request. generator: for
    the noise of unseeded draws. constraint: how the text may continue; None: in any way.

    Raises ForedraftError for structured_outputs without a constraint made from them.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        generator: torch.Generator,
        *,
        child: int = 0,
        end_ids: Iterable[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
        constraint: Constraint | None = None,
        rules: CheckpointRules = NO_CHECKPOINT_RULES,
    ) -> None:
        if params.structured_outputs is not None and constraint is None:
            raise ForedraftError("structured_outputs must come with a constraint made from it: use LLM")
        self.params = params
        self.spec = SamplingSpec.of(params, child)
        self.generator = generator
        self.unused_uniforms: list[float] = []
        self._coupled_spec: SamplingSpec | None = None
        self.prompt_len = len(prompt)
        self.end_ids = tuple(end_ids)
        self.bad_words = tuple(tuple(word) for word in bad_words)
        self.rules = rules
        self._bans_after = _bans_after(self.bad_words, self.prompt_len) + _bans_after(rules.bad_words, 0)
        self.constraint = constraint
        self._bias = _bias_tensors(params)
        self._allowed = _allowed_tensor(params)
        self._counts = TokenCounts(prompt) if _has_penalties(params) else None
        self.has_logits_processors = bool(
            self._counts is not None
            or self._bias
            or self._bans_after
            or rules.not_first
            or rules.last_ids
            or params.logits_processors
            or (params.min_tokens and self.end_ids)
            or params.allowed_token_ids is not None
        )

        self._depends_on_counts_alone = not (
            params.logits_processors or self._allowed is not None or any(ban.prefix for ban in self._bans_after)
        )

    def fresh(self, prompt: Sequence[int], params: SamplingParams | None = None) -> Sampler:
        """A new sampler for the same request, with no state from its text. params: replace its own."""
        return Sampler(
            params or self.params,
            prompt,
            self.generator,
            child=self.spec.child,
            end_ids=self.end_ids,
            bad_words=self.bad_words,
            constraint=self.constraint,
            rules=self.rules,
        )

    @property
    def child(self) -> int:
        return self.spec.child

    def uniforms(self, count: int) -> list[float]:
        """Fresh uniform numbers in [0, 1). The generator makes several at once, because between two passes, when the caches hold weights,
        the call takes longer than the numbers."""
        if len(self.unused_uniforms) < count:
            numbers = torch.rand(max(count, _UNIFORMS_AT_ONCE), generator=self.generator, dtype=torch.float64)
            self.unused_uniforms += numbers.tolist()
        taken, self.unused_uniforms = self.unused_uniforms[:count], self.unused_uniforms[count:]
        return taken

    @property
    def coupled_spec(self) -> SamplingSpec:
        """spec, but with coupled noise instead of fresh noise, under a random seed of its own."""
        if not self.spec.draws:
            return self.spec
        if self._coupled_spec is None:
            seed = int(torch.randint(1 << 62, (), generator=self.generator))
            self._coupled_spec = self.spec._replace(seed=seed, noise=Noise.COUPLED)
        return self._coupled_spec

    @property
    def is_greedy(self) -> bool:
        return self.spec.is_greedy

    @property
    def is_coupled(self) -> bool:
        """Whether target and drafter draw with the same noise, so that a draft id is certain given the history."""
        return self.spec.is_coupled

    @property
    def draws(self) -> bool:
        """Whether a token is drawn with fresh noise."""
        return self.spec.draws

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before the temperature is applied."""
        return self.has_logits_processors or self.constraint is not None

    def warp(self, logits: Tensor, history: Sequence[int], drafted: Sequence[int]) -> Tensor:
        """Apply penalties, user processors, logit bias, bad words and masks, but not the constraint, to the row after history +
        drafted. logits: [V], written to -> [V]. Raises RowError if a processor fails."""
        logits = self._penalised(logits, history, drafted)
        if self.params.logits_processors:
            logits = self._processed(logits, [*history, *drafted])
        if self._bias is not None:
            ids, values = (to_device(part, logits.device, part.dtype) for part in self._bias)
            logits[ids] += values.to(logits)
        for ban in self._bans_after:
            if _ends_with(history, drafted, ban.start, ban.prefix):
                logits[ban.token] = -torch.inf
        num_output = len(history) + len(drafted) - self.prompt_len
        if num_output < self.params.min_tokens:
            logits.index_fill_(0, to_device(self.end_ids, logits.device, torch.int64), -torch.inf)
        if self._allowed is not None:
            logits = _only(logits, to_device(self._allowed, logits.device, torch.int64))
        return self._by_rules(logits, num_output)

    def _by_rules(self, logits: Tensor, num_output: int) -> Tensor:
        """Apply the checkpoint's rules to the token after num_output ones. logits: [V], written to -> [V]"""
        rules = self.rules
        if rules.not_first and num_output == 0:
            logits.index_fill_(0, to_device(rules.not_first, logits.device, torch.int64), -torch.inf)
        if rules.last_ids and num_output + 1 == self.params.max_tokens:
            logits = torch.full_like(logits, -torch.inf)
            logits.index_fill_(0, to_device(rules.last_ids, logits.device, torch.int64), 0.0)
        return logits

    def has_adjustments(self, history: Sequence[int], num_tokens: int) -> bool:
        """Whether `adjustments` can say what `warp` does to the next num_tokens rows. It cannot run a user's processors, and it bans
        tokens whatever the tokens before them are."""
        last = self.params.max_tokens if self.rules.last_ids else None
        is_before_last = last is None or len(history) - self.prompt_len + num_tokens < last
        return self._depends_on_counts_alone and is_before_last

    def adjustments(self, history: Sequence[int]) -> Adjustments | None:
        """What `warp` does to the rows after history, for models that choose several tokens in one call; None: nothing. Only where
        `has_adjustments`."""
        if not self.has_logits_processors:
            return None
        ids, counts, num_prompt_ids = _NO_IDS, _NO_IDS, 0
        if self._counts is not None:
            self._counts.go_to(history)
            ids, counts, num_prompt_ids = self._counts.arrays()
        p, bans = self.params, self._bans(len(history) - self.prompt_len)
        biased, biases = self._bias or (_NO_IDS, _NO_BIASES)
        return Adjustments(
            ids,
            counts,
            num_prompt_ids,
            1.0 if p.repetition_penalty is None else p.repetition_penalty,
            p.frequency_penalty,
            p.presence_penalty,
            biased,
            biases,
            torch.tensor(list(bans), dtype=torch.int64),
            torch.tensor(list(bans.values()), dtype=torch.int64),
        )

    def _bans(self, num_output: int) -> dict[int, int]:
        """The ids that are banned after num_output tokens, and for how many tokens."""
        bans: dict[int, int] = {}
        if num_output == 0:
            bans |= dict.fromkeys(self.rules.not_first, 1)
        if num_output < self.params.min_tokens:
            bans |= dict.fromkeys(self.end_ids, self.params.min_tokens - num_output)
        return bans | {ban.token: _ALWAYS for ban in self._bans_after}

    def num_allowed(self, history: Sequence[int], drafted: Sequence[int]) -> int:
        """The number of draft tokens before the first that the constraint forbids. 0 if it raises: the row that depends on it then
        fails with that error."""
        try:
            return len(drafted) if self.constraint is None else self.constraint.num_allowed(history, drafted)
        except Exception:
            return 0

    def forced(self, history: Sequence[int], drafted: Sequence[int], at_most: int) -> list[int]:
        """The ids that must follow history + drafted because the constraint allows no others."""
        try:
            return [] if self.constraint is None else self.constraint.forced(history, drafted, at_most)
        except Exception:  # no draft token is worth an error: see num_allowed
            return []

    def mask(self, history: Sequence[int], drafted: Sequence[int]) -> Bits:
        """The ids that the constraint allows after history + drafted. Raises RowError if it cannot decide."""
        assert self.constraint is not None
        try:
            return self.constraint.allowed(history, drafted)
        except Exception as error:
            raise RowError(message_of(error)) from error

    def _penalised(self, logits: Tensor, history: Sequence[int], drafted: Sequence[int]) -> Tensor:
        if self._counts is None:
            return logits
        self._counts.go_to(history, drafted)
        ids, outputs, seen = self._counts.tensors(logits.device)
        p, values = self.params, logits[ids]
        penalty = 1.0 if p.repetition_penalty is None else p.repetition_penalty
        values = torch.where(seen, torch.where(values > 0, values / penalty, values * penalty), values)
        outputs = outputs.to(values.dtype)
        values = values - p.frequency_penalty * outputs - p.presence_penalty * outputs.clamp(max=1)
        logits[ids] = values.to(logits.dtype)
        return logits

    def _processed(self, logits: Tensor, prefix: list[int]) -> Tensor:
        for processor in self.params.logits_processors:
            try:
                out = processor(list(prefix), logits.clone())
                if isinstance(out, Tensor):
                    out = out.to(logits)  # before the check: large numbers may become infinite
                problem = _problem_with(out, logits)
            except Exception as error:
                raise RowError(f"logits processor {_name(processor)} raised {one_line(error)}") from error
            if problem:
                raise RowError(f"logits processor {_name(processor)} must return {problem}")
            logits = out
        return logits


class RowError(Exception):
    """One row has no distribution. Its message is the error that the request would end with."""


class Row(NamedTuple):
    """One row of logits: the distribution after history + drafted, for this sampler. is_coupled: a row of a tree, whose token is drawn
    with the same noise as in the drafter, even if the request has no seed."""

    sampler: Sampler
    history: Sequence[int]
    drafted: Sequence[int] = ()
    is_coupled: bool = False

    @property
    def spec(self) -> SamplingSpec:
        return self.sampler.coupled_spec if self.is_coupled else self.sampler.spec

    @property
    def position(self) -> int:
        """The position in the output of the token that this row decides, from 0."""
        return len(self.history) + len(self.drafted) - self.sampler.prompt_len

    @property
    def noise_key(self) -> int:
        """The key of this token's coupled noise."""
        return self.spec.noise_keys(self.position, 1)[0]


Failures: TypeAlias = Mapping[int, str]
"""Failed rows -> what went wrong. The caller decides whether it matters: plain decoding would never have reached a row that follows a
rejected draft token."""

NO_FAILURES: Failures = MappingProxyType({})


class AdjustedLogits(NamedTuple):
    """logits: [R, V], before the temperature. failed: rows without a distribution; their logits are meaningless, but can be sampled
    from."""

    logits: Tensor
    failed: Failures = NO_FAILURES


class Choice(NamedTuple):
    """One token for each row.

    ids: for a failed row, a valid but meaningless id. margins: by how much `log p + noise` of each chosen id exceeds the second best (in
    greedy and seeded rows; infinite in others), or None if not requested.
    """

    ids: list[int]
    margins: list[float] | None = None
    failed: Failures = NO_FAILURES


def adjusted(logits: Tensor, rows: Sequence[Row]) -> AdjustedLogits:
    """Apply penalties, user processors, logit bias, bad words and masks to each row. The result is in float32 or wider if any row is
    changed by more than a mask. logits: [R, V], not written to"""
    touched = [r for r, row in enumerate(rows) if row.sampler.changes_logits]
    if not touched:
        return AdjustedLogits(logits)
    is_wide = logits.dtype in (torch.float32, torch.float64) or not any(
        rows[r].sampler.has_logits_processors for r in touched
    )
    out = logits.clone() if is_wide else logits.float()
    return AdjustedLogits(out, _adjust(out, rows, touched))


def _adjust(logits: Tensor, rows: Sequence[Row], touched: Sequence[int]) -> Failures:
    """logits: [R, V], written to. touched: the rows that change. -> those of them that failed"""
    failed: dict[int, str] = {}
    masks: list[tuple[int, Bits]] = []
    in_one_call = _adjust_in_one_call(logits, rows, touched)
    for r in touched:
        sampler, history, drafted, _ = rows[r]
        try:
            if sampler.has_logits_processors and r not in in_one_call:
                logits[r] = sampler.warp(logits[r], history, drafted)
            if sampler.constraint is not None:
                masks.append((r, sampler.mask(history, drafted)))
        except RowError as error:
            failed[r] = str(error)
    refuse(logits, masks)
    is_empty = select(logits, touched).amax(-1).isneginf().tolist()
    for r in [r for r, empty in zip(touched, is_empty, strict=True) if empty]:
        failed.setdefault(r, "nothing is left to sample after bias, bad words and masks")
        logits[r] = 0  # any distribution will do, since the row has failed
    return failed


def _adjust_in_one_call(logits: Tensor, rows: Sequence[Row], touched: Sequence[int]) -> set[int]:
    """Let the compiled kernels do what `warp` does, for the rows where they can. logits: [R, V], written to. -> these rows"""
    kernels = kernels_for(logits)
    if kernels is None:
        return set()
    found: list[tuple[int, Adjustments, Sequence[int]]] = []
    for _, group in groupby(touched, lambda r: (id(rows[r].sampler), id(rows[r].history))):  # the rows of a text
        able = [r for r in group if rows[r].sampler.has_adjustments(rows[r].history, len(rows[r].drafted) + 1)]
        adjustments = rows[able[0]].sampler.adjustments(rows[able[0]].history) if able else None
        if adjustments is not None:
            found += [(r, adjustments, rows[r].drafted) for r in able]
    if found:
        kernels.adjust(logits, *zip(*found, strict=True))
    return {r for r, _, _ in found}


def choose(logits: Tensor, rows: Sequence[Row], *, margins: bool = False) -> Choice:
    """Choose each row's token as the target (or a drafter) alone would. logits: [R, V]"""
    return pending_choice(logits, rows, margins=margins).resolve()


def pending_choice(logits: Tensor, rows: Sequence[Row], *, margins: bool = False) -> Pending[Choice]:
    """`choose`, but the result is copied from the device only when it is resolved."""
    logits, failed = adjusted(logits, rows)
    kernels = kernels_for(logits)
    if kernels is not None and not margins:
        return Pending.of(_choice(kernels.choose(logits, draw_specs(rows)), None, failed))
    greedy = [r for r, row in enumerate(rows) if row.spec.is_greedy]
    groups = [group for group in (greedy, *sampled_groups(rows)) if group]
    parts = [_chosen(select(logits, group), [rows[r] for r in group], margins) for group in groups]
    if len(groups) == 1:
        return Pending(parts, lambda host: _choice_of(host[0], failed))
    order = torch.tensor([r for group in groups for r in group])

    def finish(host: Sequence[Tensor]) -> Choice:
        columns = torch.cat(list(host), dim=1)
        return _choice_of(torch.empty_like(columns).index_copy_(1, order, columns), failed)

    return Pending(parts, finish)


def _choice_of(numbers: Tensor, failed: Failures) -> Choice:
    """numbers: [1 or 2, R] on the CPU: ids, -1 where a row is not a distribution, and margins if requested."""
    ids, *margins = numbers.tolist()
    return _choice(list(map(int, ids)), margins[0] if margins else None, failed)


def _choice(ids: list[int], margins: list[float] | None, failed: Failures) -> Choice:
    """ids: -1 where a row is not a distribution. failed: rows that failed before."""
    ids, not_a_distribution = _checked(ids)
    return Choice(ids, margins, {**not_a_distribution, **failed} if failed else not_a_distribution)


def _chosen(logits: Tensor, rows: Sequence[Row], margins: bool) -> Tensor:
    """The tokens of rows of one kind: ids, -1 where a row is not a distribution, and margins if requested. -> [1 or 2, R] float64, on
    the device of the logits"""
    if rows[0].spec.is_greedy:
        found = top_two_on_device(logits)
        if found is not None:
            return found if margins else found[:1]
        ids, gap = _argmax(logits, margins)
    else:
        ids, gap = pick(token_probs_of(logits, rows), rows, margins=margins)
    if gap is None and margins:
        gap = torch.full(ids.shape, torch.inf, dtype=torch.float64, device=ids.device)
    return torch.stack([ids.to(torch.float64)] if gap is None else [ids.to(torch.float64), gap.to(torch.float64)])


def draw_specs(rows: Sequence[Row], counts: Sequence[int] | None = None) -> list[DrawSpec]:
    """How each row's token and the ones after it are chosen: counts[r] tokens in all (None: one), each with its own noise."""
    if all(row.sampler.spec.is_greedy for row in rows):
        return [DrawSpec()] * len(rows)
    counts = counts or [1] * len(rows)
    num_drawn = sum(count for row, count in zip(rows, counts, strict=True) if row.spec.draws)
    uniforms: Iterator[float] = iter(())
    if num_drawn:
        uniforms = iter(next(row.sampler for row in rows if row.spec.draws).uniforms(num_drawn))
    return [
        row.spec.draw_spec(row.position, count, list(islice(uniforms, count)) if row.spec.draws else ())
        for row, count in zip(rows, counts, strict=True)
    ]


def draft_specs(rows: Sequence[Row], counts: Sequence[int]) -> list[DrawSpec]:
    """draw_specs with the adjustments of each row's logits, for a model that chooses counts[r] tokens after row r in one call."""
    return [
        spec._replace(adjustments=row.sampler.adjustments(row.history)) if row.sampler.has_logits_processors else spec
        for spec, row in zip(draw_specs(rows, counts), rows, strict=True)
    ]


def choose_with(specs: Sequence[DrawSpec], step: int, logits: Tensor) -> tuple[list[int], dict[int, Tensor]]:
    """Choose one token for each row like the compiled kernels, for devices without them: token number `step` of each spec.
    logits: [R, V]

    -> R ids, -1 where a row is not a distribution; for each drawn row, its distribution [V]
    """
    groups: dict[tuple[bool, tuple[int, float, float] | None] | None, list[int]] = {}
    for r, spec in enumerate(specs):
        groups.setdefault((spec.is_drawn, spec.truncation) if spec.temperature > 0 else None, []).append(r)
    parts: list[Tensor] = []
    dense: dict[int, Tensor] = {}
    for kind, group in groups.items():
        group_logits, group_specs = select(logits, group), [specs[r] for r in group]
        if kind is None:
            found = top_two_on_device(group_logits)
            parts.append(_argmax(group_logits, margins=False)[0] if found is None else found[0].to(torch.int64))
            continue
        is_drawn, truncation = kind
        token_probs = token_probs_under(group_logits, [spec.temperature for spec in group_specs], truncation)
        if is_drawn:
            uniforms = to_device([spec.uniforms[step] for spec in group_specs], logits.device, torch.float64)
            columns = inverse_cdf(token_probs.probs, uniforms)
            dense |= zip(group, token_probs.dense(logits.shape[1]), strict=True)
        else:
            keys = [spec.keys[step] for spec in group_specs]
            columns = shared_scores(token_probs.probs, keys, token_probs.ids).argmax(-1)
        parts.append(token_probs.checked_id_at(columns))
    # one copy for all, since each copy waits for the device
    ids = dict(zip((r for group in groups.values() for r in group), torch.cat(parts).tolist(), strict=True))
    return [ids[r] for r in range(len(specs))], dense


def sampled_groups(rows: Sequence[Row]) -> list[list[int]]:
    """The rows that sample, in groups with the same kind of noise and the same truncation, as `token_probs_of` and `pick` need them."""
    groups: dict[tuple[bool, tuple[int, float, float] | None], list[int]] = {}
    for r, row in enumerate(rows):
        if not row.spec.is_greedy:
            groups.setdefault((row.spec.is_coupled, row.spec.truncation), []).append(r)
    return list(groups.values())


def token_probs_of(logits: Tensor, rows: Sequence[Row]) -> TokenProbs:
    """The probabilities of rows that sample with the same truncation. logits: [R, V], adjusted"""
    return token_probs_under(logits, [row.spec.temperature for row in rows], rows[0].spec.truncation)


def pick(token_probs: TokenProbs, rows: Sequence[Row], *, margins: bool = False) -> tuple[Tensor, Tensor | None]:
    """Draw each row's token with its kind of noise (one kind per call). -> ids [R], -1 where a row is not a distribution (see
    `checked_ids`); margins [R] or None"""
    gap = None
    if rows[0].spec.is_coupled:
        scores = shared_scores(token_probs.probs, [row.noise_key for row in rows], token_probs.ids)
        columns = scores.argmax(-1)
        if margins and scores.shape[1] > 1:
            best = scores.topk(2, dim=-1).values.log()
            gap = best[:, 0] - best[:, 1]
    else:
        uniforms = to_device(rows[0].sampler.uniforms(len(rows)), token_probs.probs.device, torch.float64)
        columns = inverse_cdf(token_probs.probs, uniforms)
    return token_probs.checked_id_at(columns), gap


def checked_ids(ids: Tensor) -> tuple[list[int], Failures]:
    """The ids of `pick`, with each -1 replaced by a valid id, and the rows that had a -1. ids: [R]"""
    return _checked(ids.tolist())


def _checked(ids: list[int]) -> tuple[list[int], Failures]:
    if min(ids) >= 0:
        return ids, NO_FAILURES
    failed = [row for row, token in enumerate(ids) if token < 0]
    return [max(token, 0) for token in ids], dict.fromkeys(failed, NOT_A_DISTRIBUTION)


def _argmax(logits: Tensor, margins: bool) -> tuple[Tensor, Tensor | None]:
    ids = argmax_rows(logits)
    is_nan = logits.gather(1, ids[:, None])[:, 0].isnan()
    gap = None
    if margins and logits.shape[1] > 1:
        best = top_rows(logits, 2)[0].to(torch.float64)
        gap = best[:, 0] - best[:, 1]
    return torch.where(is_nan, -1, ids), gap


def select(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """The logits of some rows, in ascending order; without a copy if these are all rows."""
    return (
        logits if len(rows) == logits.shape[0] else logits.index_select(0, to_device(rows, logits.device, torch.int64))
    )


def _has_penalties(p: SamplingParams) -> bool:
    return bool(p.repetition_penalty not in (None, 1.0) or p.presence_penalty or p.frequency_penalty)


def _bias_tensors(p: SamplingParams) -> tuple[Tensor, Tensor] | None:
    if not p.logit_bias:
        return None
    ids = torch.tensor(list(p.logit_bias), dtype=torch.int64)
    return ids, torch.tensor(list(p.logit_bias.values()), dtype=torch.float32)


def _allowed_tensor(p: SamplingParams) -> Tensor | None:
    return None if p.allowed_token_ids is None else torch.tensor(sorted(set(p.allowed_token_ids)), dtype=torch.int64)


def _only(logits: Tensor, ids: Tensor) -> Tensor:
    """Mask all ids but these. logits: [V], ids: [N] -> [V]"""
    return torch.full_like(logits, -torch.inf).index_copy_(0, ids, logits[ids])


def _bans_after(words: Iterable[tuple[int, ...]], start: int) -> tuple[_BanAfter, ...]:
    return tuple(_BanAfter(word[:-1], word[-1], start) for word in words)


def _ends_with(history: Sequence[int], drafted: Sequence[int], start: int, suffix: tuple[int, ...]) -> bool:
    """Whether history + drafted, from `start` on, ends with `suffix`."""
    if len(suffix) > len(history) + len(drafted) - start:
        return False
    tail = [*history[max(start, len(history) - len(suffix)) :], *drafted]
    return not suffix or tuple(tail[-len(suffix) :]) == suffix


def _problem_with(out: object, logits: Tensor) -> str | None:
    if not isinstance(out, Tensor) or out.shape != logits.shape:
        return f"logits of shape {tuple(logits.shape)}"
    if bool(out.isnan().any()) or bool(out.isposinf().any()) or bool(out.isneginf().all()):
        return "numbers below +inf, at least one of them above -inf, and no NaN"
    return None


def _name(processor: LogitsProcessor) -> str:
    return getattr(processor, "__name__", type(processor).__name__)
