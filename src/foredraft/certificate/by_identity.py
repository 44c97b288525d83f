"""The tests of texts that must be plain decoding's own, token for token."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from foredraft.certificate.controls import GREEDY
from foredraft.certificate.forced import Forced, force
from foredraft.certificate.identity import Identity, compare_texts
from foredraft.certificate.report import CheckResult
from foredraft.certificate.setting import Setting
from foredraft.certificate.testing import Found, Rejection
from foredraft.certificate.trial import Subject, Text, Trial, plain
from foredraft.certificate.wording import forced_line, identity_line, identity_odds
from foredraft.sampling import AUTO

_CHUNK = 4
_FEW = 2


@dataclass(frozen=True, slots=True)
class _Written:
    texts: list[Text]
    num_drafted: int
    num_sampled: int

    @property
    def num_tokens(self) -> int:
        return sum(len(text.output_ids) for text in self.texts)


class IdentityTest:
    """Every prompt twice: with the user's drafts, and with some that are partly wrong. Where the policy decides on drafts,
    the same once more with what it chooses."""

    def __init__(self, setting: Setting, real: Subject, kind: str) -> None:
        self.kind = kind
        self._setting = setting
        self._real = real
        self._plain: list[Text] = []

    def run(self) -> Found:
        every = range(len(self._setting.prompts))
        self._plain = self._write_plain()
        written = self._write(self._real, every)
        results, left_out = self._results(self.kind, written), []
        if self._setting.is_auto:
            own = self._write_as_policy()
            results += self._results(f"{self.kind}, {AUTO}", own)
            if not own.num_drafted:
                left_out.append(f"drafts that the policy chooses in {self.kind} texts: it chose none")
        return Found(results, written.num_drafted, written.num_sampled, left_out)

    def reject(self, subject: Subject, seconds: float) -> Rejection:
        started, seen, by = time.perf_counter(), 0, None
        for which in _chunks(len(self._setting.prompts), _CHUNK):
            written = self._write(subject, which)
            by = _rejected_by(*self._compare(written.texts, which))
            seen += written.num_tokens
            if by or time.perf_counter() - started > seconds:
                break
        return Rejection(by, seen, None)

    def _write_plain(self) -> list[Text]:
        """One for each text with drafts."""
        params = plain(self._setting.params_of(self.kind))
        trial = self._setting.trial(self._real)
        if self.kind != GREEDY:
            return trial.write(self._setting.prompts, replace(params, n=2))
        return [text for text in trial.write(self._setting.prompts, params) for _ in range(2)]

    def _write(self, subject: Subject, which: range) -> _Written:
        """which: the prompts."""
        trial = self._setting.trial(subject, self._plain_of(which))
        texts = trial.write(
            self._setting.prompts[which.start : which.stop], replace(self._setting.params_of(self.kind), n=2)
        )
        return _written(texts, trial)

    def _write_as_policy(self) -> _Written:
        """A few at a time, because drafting pays best there."""
        trial = self._setting.trial(self._real, self._plain, is_auto=True)
        params = replace(self._setting.params_of(self.kind), n=2, speculative_tokens=AUTO)
        prompts = self._setting.prompts
        texts = [
            text
            for which in _chunks(len(prompts), _FEW)
            for text in trial.write(prompts[which.start : which.stop], params)
        ]
        return _written(texts, trial)

    def _plain_of(self, which: range) -> list[Text]:
        return self._plain[2 * which.start : 2 * which.stop]

    def _compare(self, texts: list[Text], which: range) -> tuple[Identity, Forced]:
        """which: the prompts that the texts complete."""
        model, noise = self._setting.llm.target, self._setting.noise
        return compare_texts(model, self._plain_of(which), texts, noise), force(model, texts, noise)

    def _results(self, kind: str, written: _Written) -> list[CheckResult]:
        noise, num_texts, drafted = self._setting.noise, len(written.texts), written.num_drafted
        found, forced = self._compare(written.texts, range(len(self._setting.prompts)))
        return [
            CheckResult(
                "identity", kind, num_texts, written.num_tokens, drafted, not found.num_different,
                identity_line(found), identity_odds(num_texts, noise),
                {"num_tied": found.num_tied, "num_different": found.num_different,
                 "first_difference": found.first_difference},
            ),
            CheckResult(
                "teacher-forced", kind, num_texts, forced.num_tokens, drafted, not forced.num_wrong,
                forced_line(forced, noise), "no chance involved",
                {"num_missed": forced.num_missed, "num_wrong": forced.num_wrong, "worst_margin": forced.worst_margin},
            ),
        ]  # fmt: skip


def _written(texts: list[Text], trial: Trial) -> _Written:
    return _Written(texts, trial.num_drafted, trial.num_sampled)


def _chunks(count: int, size: int) -> Iterable[range]:
    return (range(first, min(first + size, count)) for first in range(0, count, size))


def _rejected_by(found: Identity, forced: Forced) -> str | None:
    """Both tests where both did."""
    names = [("identity", found.num_different), ("teacher-forced", forced.num_wrong)]
    return ", ".join(name for name, bad in names if bad) or None
