"""The tests of texts that must be plain decoding's own, token for token.

Each is compared with plain decoding's text (identity), and each of its tokens with the choice of an independent pass over
the text (teacher-forced): for greedy texts and for those with a seed, where the target's token follows from its law
alone: argmax(log p + noise).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.certificate.reading import read_whole, rows_of
from foredraft.certificate.report import GREEDY, CheckResult
from foredraft.certificate.setting import Setting, shortened
from foredraft.certificate.trial import Found, Rejection, Subject, Text, Trial, plain
from foredraft.certificate.wording import finite
from foredraft.errors import RequestError
from foredraft.model import LanguageModel
from foredraft.sampling import AUTO, Row, SamplingParams, adjusted, choose, token_probs_of
from foredraft.sampling.noise import exponentials
from foredraft.utils.prefix import common_prefix

_CHUNK = 2
_SHORT = 24
"""Tokens of a text in which a gross mistake shows."""
_MOST_AS_POLICY = 6
"""Prompts that are completed once more as the policy chooses: a few at a time, which is slow."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Pairs of texts. num_tied: they part at a token that was a tie on this machine, and no more is said of them.
    num_different: they part elsewhere. first_difference: (text, output position) of the first of these."""

    num_texts: int
    num_tied: int
    num_different: int
    first_difference: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Forced:
    """num_tokens: checked. num_missed: of these, not the choice of the pass. num_wrong: missed by more than a tie may be.
    worst_margin: the largest margin of the pass's choice over a token that was written instead; 0 where there is none."""

    num_tokens: int = 0
    num_missed: int = 0
    num_wrong: int = 0
    worst_margin: float = 0.0

    def __add__(self, other: Forced) -> Forced:
        return Forced(
            self.num_tokens + other.num_tokens,
            self.num_missed + other.num_missed,
            self.num_wrong + other.num_wrong,
            max(self.worst_margin, other.worst_margin),
        )


def compare_texts(model: LanguageModel, undrafted: Sequence[Text], drafted: Sequence[Text], noise: float) -> Identity:
    """noise: how far a logit may be off (reading.row_noise)."""
    num_tied, different = 0, list[tuple[int, int]]()
    for index, (a, b) in enumerate(zip(undrafted, drafted, strict=True)):
        if a.tokens == b.tokens:
            continue
        position = common_prefix(a.output_ids, b.output_ids)
        if noise > 0 and _is_tie(model, a, b, position, noise):
            num_tied += 1
        else:
            different.append((index, position))
    return Identity(len(drafted), num_tied, len(different), different[0] if different else None)


def force(model: LanguageModel, texts: Sequence[Text], noise: float) -> Forced:
    """Read the texts whole, and compare. noise: how far a logit may be off (reading.row_noise)."""
    total = Forced()
    for batch, logits in read_whole(model, texts):
        rows = rows_of(batch)
        written = torch.tensor([token for text in batch for token in text.output_ids])
        chosen = choose(logits, rows).ids
        missed = (chosen != written).nonzero()[:, 0].tolist()
        margins = [_margin(logits[r], rows[r], int(chosen[r]), int(written[r])) for r in missed]
        wrong = sum(gap > _tolerance(rows[r], noise) for r, gap in zip(missed, margins, strict=True))
        total += Forced(len(rows), len(missed), wrong, max(margins, default=0.0))
    return total


class IdentityTest:
    """Every prompt twice (or as many times as the request wants texts): with the user's drafts, and with some that are
    partly wrong. Where the policy decides on drafts, the same once more with what it chooses."""

    def __init__(self, setting: Setting, real: Subject, kind: str) -> None:
        self.kind = kind
        self._setting = setting
        self._real = real
        self._copies = setting.num_copies
        self._plain: list[Text] = []

    def run(self) -> Found:
        """Raises RequestError where plain decoding fails too."""
        every = range(len(self._setting.prompts))
        self._plain = self._write_plain()
        try:
            trial, texts = self._write(self._real, every, self._setting.length)
            own, own_texts = self._write_as_policy() if self._setting.is_auto else (None, [])
        except RequestError as error:
            return Found([self._failed(error)], 0, 0)
        results, left_out = self._results(self.kind, trial, texts), []
        if own is not None:
            results += self._results(f"{self.kind}, {AUTO}", own, own_texts)
            if not own.num_drafted:
                left_out.append(f"drafts that the policy chooses in {self.kind} texts: it chose none")
        max_len = max(len(text.tokens) for text in self._plain)
        return Found(results, trial.num_drafted, trial.num_sampled, left_out, max_len)

    def reject(self, subject: Subject) -> Rejection:
        """First with short texts of a few prompts, then with all there is."""
        first = range(min(_CHUNK, len(self._setting.prompts)))
        parts = [(first, _SHORT), *((which, self._setting.length) for which in self._chunks())]
        seen = 0
        for which, length in parts:
            try:
                _, texts = self._write(subject, which, length)
            except RequestError:
                return Rejection("identity", seen, None)
            by = _rejected_by(*self._compare(texts, which, length))
            seen += _num_tokens(texts)
            if by:
                return Rejection(by, seen, None)
            if self._setting.deadline.is_over():
                return Rejection(None, seen, None, is_cut=True)
        return Rejection(None, seen, None)

    def _write_plain(self) -> list[Text]:
        """One for each text with drafts."""
        params = plain(self._setting.params_of(self.kind))
        trial = self._setting.trial(self._real)
        if self.kind != GREEDY:
            return trial.write(self._setting.prompts, replace(params, n=self._copies))
        return [text for text in trial.write(self._setting.prompts, params) for _ in range(self._copies)]

    def _write(self, subject: Subject, which: range, length: int) -> tuple[Trial, list[Text]]:
        """which: the prompts. length: tokens of a text, at most."""
        trial = self._setting.trial(subject, self._plain_of(which))
        params = shortened(self._params(), length)
        return trial, trial.write(self._setting.prompts[which.start : which.stop], params)

    def _write_as_policy(self) -> tuple[Trial, list[Text]]:
        """A few at a time, because drafting pays best there."""
        trial = self._setting.trial(self._real, self._plain, is_auto=True)
        params = replace(self._params(), speculative_tokens=AUTO)
        prompts = self._setting.prompts[:_MOST_AS_POLICY]
        return trial, [
            text
            for which in self._chunks(len(prompts))
            for text in trial.write(prompts[which.start : which.stop], params)
        ]

    def _params(self) -> SamplingParams:
        return replace(self._setting.params_of(self.kind), n=self._copies)

    def _chunks(self, most: int | None = None) -> Iterable[range]:
        count = len(self._setting.prompts) if most is None else most
        return (range(first, min(first + _CHUNK, count)) for first in range(0, count, _CHUNK))

    def _plain_of(self, which: range) -> list[Text]:
        return self._plain[self._copies * which.start : self._copies * which.stop]

    def _compare(self, texts: list[Text], which: range, length: int) -> tuple[Identity, Forced]:
        """which: the prompts that the texts complete. length: tokens of a text, at most."""
        model, noise = self._setting.llm.target, self._setting.noise
        undrafted = [text.upto(length) for text in self._plain_of(which)]
        return compare_texts(model, undrafted, texts, noise), force(model, texts, noise)

    def _results(self, kind: str, trial: Trial, texts: list[Text]) -> list[CheckResult]:
        noise, num_texts, drafted = self._setting.noise, len(texts), trial.num_drafted
        found, forced = self._compare(texts, range(num_texts // self._copies), self._setting.length)
        return [
            CheckResult(
                "identity", kind, num_texts, _num_tokens(texts), drafted, not found.num_different,
                _identity_line(found), _identity_odds(num_texts, noise),
                {"num_tied": found.num_tied, "num_different": found.num_different,
                 "first_difference": found.first_difference},
            ),
            CheckResult(
                "teacher-forced", kind, num_texts, forced.num_tokens, drafted, not forced.num_wrong,
                _forced_line(forced, noise), "no chance involved",
                {"num_missed": forced.num_missed, "num_wrong": forced.num_wrong,
                 "worst_margin": finite(forced.worst_margin)},
            ),
        ]  # fmt: skip

    def _failed(self, error: RequestError) -> CheckResult:
        return CheckResult(
            "identity", self.kind, 0, 0, 0, False, f"a text failed that plain decoding writes: {error}",
            "no chance involved", {},
        )  # fmt: skip


def _is_tie(model: LanguageModel, a: Text, b: Text, position: int, noise: float) -> bool:
    if position >= min(len(a.output_ids), len(b.output_ids)):
        return False
    ((texts, logits),) = read_whole(model, [a.upto(position + 1)])
    row = rows_of(texts)[-1]
    best = int(choose(logits[-1:], [row]).ids[0])
    gaps = (_margin(logits[-1], row, best, text.output_ids[position]) for text in (a, b))
    return all(gap <= _tolerance(row, noise) for gap in gaps)


def _margin(logits: Tensor, row: Row, best: int, other: int) -> float:
    """By how much `log p + noise` (the logit, at temperature 0) of one token beats another's. logits: [V]"""
    raw = adjusted(logits[None], [row])
    if row.sampler.is_greedy:
        return float(raw[0, best].double() - raw[0, other].double())
    law = token_probs_of(raw, [row])
    ids = torch.tensor([best, other], device=logits.device)
    p = law.at(torch.zeros(1, dtype=torch.int64, device=ids.device), ids[None])[0].to(torch.float64)
    scores = p.log() - exponentials([row.noise_key], ids)[0].log()
    return float(scores[0] - scores[1])


def _tolerance(row: Row, noise: float) -> float:
    """How wide a tie may be: both tokens' logits may be off."""
    temperature = row.sampler.params.temperature
    return 2 * noise / (1.0 if row.sampler.is_greedy or not temperature else min(1.0, temperature))


def _num_tokens(texts: Sequence[Text]) -> int:
    return sum(len(text.output_ids) for text in texts)


def _rejected_by(found: Identity, forced: Forced) -> str | None:
    """Both tests where both did."""
    names = [("identity", found.num_different), ("teacher-forced", forced.num_wrong)]
    return ", ".join(name for name, bad in names if bad) or None


def _identity_line(found: Identity) -> str:
    same = found.num_texts - found.num_tied - found.num_different
    line = f"{same} of {found.num_texts} texts identical to plain decoding's"
    if found.num_tied:
        line += f", {found.num_tied} part at a tie"
    if found.first_difference is not None:
        text, position = found.first_difference
        line += f", text {text + 1} differs from token {position + 1}"
    return line


def _identity_odds(num_texts: int, noise: float) -> str:
    share = 1 - 0.01 ** (1 / num_texts)
    alarm = "no false alarm" if noise == 0 else f"ties up to {2 * noise:.1e} in the logits are let through"
    return f"{alarm}; a fault in {share:.0%} of such texts is found with odds 0.99"


def _forced_line(forced: Forced, noise: float) -> str:
    right = forced.num_tokens - forced.num_missed
    line = f"{right:,} of {forced.num_tokens:,} tokens are the choice of an independent pass"
    if forced.num_missed:
        line += f"; the widest margin missed is {forced.worst_margin:.2g} ({2 * noise:.2g} would be a tie)"
    return line
