"""Texts that must be plain decoding's own, token for token: greedy ones, and those with a seed.

Each is compared with plain decoding's text (identity), and each of its tokens with the choice of an independent pass over
the text (teacher-forced), which follows from the target's law alone: argmax(log p + noise).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.certificate.betting import finite
from foredraft.certificate.checks import CheckRun, Rejection
from foredraft.certificate.report import GREEDY, CheckResult
from foredraft.certificate.setting import Setting
from foredraft.certificate.texts import Subject, Text, Trial, read_whole, rows_of, shortened, without_drafts
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
    """Pairs of texts. num_tied: those that part at a token that was a tie on this machine; what follows is not compared.
    num_different: those that part elsewhere. first_difference: (text, output position) of the first of these.
    noise: how far a logit may be off (texts.row_noise)."""

    num_texts: int
    num_tied: int
    num_different: int
    first_difference: tuple[int, int] | None
    noise: float

    def result(self, kind: str, num_tokens: int, num_drafted: int) -> CheckResult:
        figures = {
            "num_tied": self.num_tied,
            "num_different": self.num_different,
            "first_difference": self.first_difference,
        }
        return CheckResult(
            "identity", kind, self.num_texts, num_tokens, num_drafted, not self.num_different,
            self._detail, self._odds, figures,
        )  # fmt: skip

    @property
    def _detail(self) -> str:
        same = self.num_texts - self.num_tied - self.num_different
        line = f"{same} of {self.num_texts} texts identical to plain decoding's"
        if self.num_tied:
            line += f", {self.num_tied} part at a tie"
        if self.first_difference is not None:
            text, position = self.first_difference
            line += f", text {text + 1} differs from token {position + 1}"
        return line

    @property
    def _odds(self) -> str:
        share = 1 - 0.01 ** (1 / self.num_texts)
        alarm = f"ties up to {2 * self.noise:.1e} in the logits are let through" if self.noise else "no false alarm"
        return f"{alarm}; a fault in {share:.0%} of such texts is found with odds 0.99"


@dataclass(frozen=True, slots=True)
class Forced:
    """The choices of a pass over texts. margins: of the pass's choice over the token that was written instead, one for each
    token where they differ. num_wrong: of these, the ones that are wider than a tie."""

    num_texts: int
    num_tokens: int
    margins: list[float]
    num_wrong: int
    noise: float

    def result(self, kind: str, num_drafted: int) -> CheckResult:
        num_missed, worst = len(self.margins), max(self.margins, default=0.0)
        detail = f"{self.num_tokens - num_missed:,} of {self.num_tokens:,} tokens are the choice of an independent pass"
        if num_missed:
            detail += f"; the widest margin missed is {worst:.2g} ({2 * self.noise:.2g} would be a tie)"
        figures = {"num_missed": num_missed, "num_wrong": self.num_wrong, "worst_margin": finite(worst)}
        return CheckResult(
            "teacher-forced", kind, self.num_texts, self.num_tokens, num_drafted, not self.num_wrong,
            detail, "no chance involved", figures,
        )  # fmt: skip


def compare_texts(model: LanguageModel, undrafted: Sequence[Text], drafted: Sequence[Text], noise: float) -> Identity:
    num_tied, different = 0, list[tuple[int, int]]()
    for index, (a, b) in enumerate(zip(undrafted, drafted, strict=True)):
        if a.tokens == b.tokens:
            continue
        position = common_prefix(a.output_ids, b.output_ids)
        if noise > 0 and _is_tie(model, a, b, position, noise):
            num_tied += 1
        else:
            different.append((index, position))
    return Identity(len(drafted), num_tied, len(different), different[0] if different else None, noise)


def force(model: LanguageModel, texts: Sequence[Text], noise: float) -> Forced:
    """Read the texts whole, and compare each token with the choice there."""
    margins, num_tokens, num_wrong = list[float](), 0, 0
    for batch, logits in read_whole(model, texts):
        rows = rows_of(batch)
        written = torch.tensor([token for text in batch for token in text.output_ids])
        chosen = choose(logits, rows).ids
        num_tokens += len(rows)
        for r in (chosen != written).nonzero()[:, 0].tolist():
            margins.append(_margin(logits[r], rows[r], int(chosen[r]), int(written[r])))
            num_wrong += margins[-1] > _tolerance(rows[r], noise)
    return Forced(len(texts), num_tokens, margins, num_wrong, noise)


class IdentityCheck:
    """Every prompt twice (or as many times as the request wants texts): with the user's drafts, and with some that are
    partly wrong. Where the policy decides on drafts, the same once more with what it chooses."""

    def __init__(self, setting: Setting, real: Subject, kind: str) -> None:
        self.kind = kind
        self._setting = setting
        self._real = real
        self._copies = setting.num_copies
        self._params = replace(setting.params_of(kind), n=self._copies)
        self._plain: list[Text] = []

    def run(self) -> CheckRun:
        """Raises RequestError where plain decoding fails too."""
        everything = range(len(self._setting.prompts))
        self._plain = self._write_plain()
        try:
            trial, texts = self._write(self._real, everything, self._setting.length)
            by_policy = self._write_as_policy() if self._setting.is_auto else None
        except RequestError as error:
            return CheckRun([self._failed(error)])
        results, left_out = self._results(self.kind, trial, texts), []
        if by_policy is not None:
            results += self._results(f"{self.kind}, {AUTO}", *by_policy)
            if not by_policy[0].num_drafted:
                left_out.append(f"drafts that the policy chooses in {self.kind} texts: it chose none")
        max_len = max(len(text.tokens) for text in self._plain)
        return CheckRun(results, trial.num_drafted, trial.num_sampled, left_out, max_len)

    def reject(self, subject: Subject) -> Rejection:
        """First with short texts of a few prompts, then with all there is."""
        first = range(min(_CHUNK, len(self._setting.prompts)))
        parts = [(first, _SHORT), *((which, self._setting.length) for which in self._chunks())]
        num_tokens = 0
        for which, length in parts:
            try:
                _, texts = self._write(subject, which, length)
            except RequestError:
                return Rejection("identity", num_tokens)
            identity, forced = self._compare(texts, which, length)
            num_tokens += _num_tokens(texts)
            failed = (("identity", identity.num_different), ("teacher-forced", forced.num_wrong))
            if by := [name for name, count in failed if count]:
                return Rejection(", ".join(by), num_tokens)
            if self._setting.deadline.is_over():
                return Rejection(None, num_tokens, is_cut=True)
        return Rejection(None, num_tokens)

    def _write_plain(self) -> list[Text]:
        """One for each text with drafts."""
        params, trial = without_drafts(self._params), self._setting.trial(self._real)
        if self.kind != GREEDY:
            return trial.write(self._setting.prompts, params)
        texts = trial.write(self._setting.prompts, replace(params, n=1))
        return [text for text in texts for _ in range(self._copies)]

    def _write(self, subject: Subject, which: range, length: int) -> tuple[Trial, list[Text]]:
        """which: the prompts. length: tokens of a text, at most."""
        trial = self._setting.trial(subject, self._plain_of(which))
        return trial, self._write_with(trial, self._params, which, length)

    def _write_as_policy(self) -> tuple[Trial, list[Text]]:
        """A few at a time, because drafting pays best there."""
        trial = self._setting.trial(self._real, self._plain, is_auto=True)
        params = replace(self._params, speculative_tokens=AUTO)
        chunks = self._chunks(_MOST_AS_POLICY)
        return trial, [
            text for which in chunks for text in self._write_with(trial, params, which, self._setting.length)
        ]

    def _write_with(self, trial: Trial, params: SamplingParams, which: range, length: int) -> list[Text]:
        return trial.write(self._setting.prompts[which.start : which.stop], shortened(params, length))

    def _chunks(self, most: int | None = None) -> Iterable[range]:
        """most: prompts, at most."""
        count = len(self._setting.prompts[:most])
        return (range(first, min(first + _CHUNK, count)) for first in range(0, count, _CHUNK))

    def _plain_of(self, which: range) -> list[Text]:
        return self._plain[self._copies * which.start : self._copies * which.stop]

    def _compare(self, texts: list[Text], which: range, length: int) -> tuple[Identity, Forced]:
        """which: the prompts that the texts complete. length: tokens of a text, at most."""
        model, noise = self._setting.llm.target, self._setting.noise
        undrafted = [text.up_to(length) for text in self._plain_of(which)]
        return compare_texts(model, undrafted, texts, noise), force(model, texts, noise)

    def _results(self, kind: str, trial: Trial, texts: list[Text]) -> list[CheckResult]:
        identity, forced = self._compare(texts, range(len(texts) // self._copies), self._setting.length)
        return [
            identity.result(kind, _num_tokens(texts), trial.num_drafted),
            forced.result(kind, trial.num_drafted),
        ]

    def _failed(self, error: RequestError) -> CheckResult:
        detail = f"a text failed that plain decoding writes: {error}"
        return CheckResult("identity", self.kind, 0, 0, 0, False, detail, "no chance involved", {})


def _is_tie(model: LanguageModel, a: Text, b: Text, position: int, noise: float) -> bool:
    """Whether a pass finds both texts' tokens at this output position to be its choice, up to a tie."""
    if position >= min(len(a.output_ids), len(b.output_ids)):
        return False
    ((texts, logits),) = read_whole(model, [a.up_to(position + 1)])
    row = rows_of(texts)[-1]
    best = int(choose(logits[-1:], [row]).ids[0])
    gaps = (_margin(logits[-1], row, best, text.output_ids[position]) for text in (a, b))
    return all(gap <= _tolerance(row, noise) for gap in gaps)


def _margin(logits: Tensor, row: Row, best: int, other: int) -> float:
    """By how much `log p + noise` (the logit, at temperature 0) of one token beats another's. logits: [V]"""
    raw = adjusted(logits[None], [row]).logits
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
