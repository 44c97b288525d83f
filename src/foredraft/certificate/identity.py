"""Check that greedy texts, and texts with a seed, are identical to plain decoding's, token for token.

Each text is compared with plain decoding's (identity), and each of its tokens with the choice of an independent pass over
the text (teacher-forced). That choice depends on the target's distribution alone: argmax(log p + noise).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foredraft.certificate.betting import finite
from foredraft.certificate.controls import Control
from foredraft.certificate.report import GREEDY, CheckResult, CheckRun, ControlResult
from foredraft.certificate.setting import Setting
from foredraft.certificate.texts import Text, Trial, num_tokens, read_whole, rows_of, shortened
from foredraft.errors import RequestError
from foredraft.sampling import AUTO, Row, adjusted, choose, token_probs_of
from foredraft.sampling.noise import exponentials
from foredraft.text.request import Prompt
from foredraft.utils.prefix import common_prefix

_CHUNK = 2
"""Prompts completed at a time with a broken verifier, or under the LLM's own policy."""
_SHORT = 24
"""Tokens of a text that are enough to show a gross mistake."""
_MOST_AS_POLICY = 6
"""Prompts completed once more under the LLM's own policy: a few at a time, which is slow."""


class IdentityCheck:
    """Completes every prompt at least twice (Setting.num_copies): with the user's drafts, and with drafts that are partly
    wrong. Where the policy decides on drafts, some prompts are completed once more with what it chooses."""

    def __init__(self, setting: Setting, kind: str) -> None:
        self.kind = kind
        self._setting = setting
        self._model = setting.llm.target
        self._copies = setting.num_copies
        self._params = replace(setting.params_of(kind), n=self._copies)
        self._plain: list[Text] = []

    def run(self) -> CheckRun:
        """Check the real verifier. Raises RequestError if plain decoding itself fails."""
        setting = self._setting
        self._plain = self._write_plain()
        trial, left_out = setting.trial(script=self._plain), list[str]()
        try:
            results = self._results(self.kind, trial, self._plain, trial.write(setting.prompts, self._params))
            if setting.is_auto:
                by_policy = setting.trial(script=self._plain, is_auto=True)
                results += self._results(f"{self.kind}, {AUTO}", by_policy, self._plain, self._as_policy(by_policy))
                if not by_policy.record.num_drafted:
                    left_out.append(f"drafts that the policy chooses in {self.kind} texts: it chose none")
        except RequestError as error:
            detail = f"a text that plain decoding completes failed: {error}"
            return CheckRun([CheckResult("identity", self.kind, 0, 0, 0, False, detail, "no chance involved", {})])
        max_len = max(len(text.tokens) for text in self._plain)
        return CheckRun(results, trial.record.num_drafted, trial.record.num_sampled, max_len=max_len, left_out=left_out)

    def reject(self, control: Control) -> ControlResult | None:
        """Check a broken verifier, after `run`: first on short texts of a few prompts, then on all texts at full length.
        -> None if time ran out before it was rejected"""
        setting, num_seen = self._setting, 0
        chunks = self._chunks(setting.prompts)
        for (prompts, plain), length in [(chunks[0], _SHORT), *((chunk, setting.length) for chunk in chunks)]:
            trial = setting.trial(control, plain)
            try:
                texts = trial.write(prompts, shortened(self._params, length))
            except RequestError:
                return control.result(self.kind, "identity", num_seen)
            num_seen += num_tokens(texts)
            results = self._results(self.kind, trial, [text.up_to(length) for text in plain], texts)
            if failed := [result.name for result in results if not result.passed]:
                return control.result(self.kind, ", ".join(failed), num_seen)
            if setting.deadline.is_over():
                return None
        return control.result(self.kind, None, num_seen)

    def _write_plain(self) -> list[Text]:
        """Plain decoding's text for each text with drafts."""
        params, trial = replace(self._params, speculative_tokens=0), self._setting.trial()
        if self.kind != GREEDY:
            return trial.write(self._setting.prompts, params)
        texts = trial.write(self._setting.prompts, replace(params, n=1))
        return [text for text in texts for _ in range(self._copies)]

    def _as_policy(self, trial: Trial) -> list[Text]:
        """Texts drafted as the policy chooses, a few prompts at a time: drafting pays best in small batches."""
        params = replace(self._params, speculative_tokens=AUTO)
        chunks = self._chunks(self._setting.prompts[:_MOST_AS_POLICY])
        return [text for prompts, _ in chunks for text in trial.write(prompts, params)]

    def _chunks(self, prompts: Sequence[Prompt]) -> list[tuple[Sequence[Prompt], list[Text]]]:
        """-> a few prompts at a time, with plain decoding's texts for them"""
        count = self._copies
        return [
            (prompts[i : i + _CHUNK], self._plain[count * i : count * (i + _CHUNK)])
            for i in range(0, len(prompts), _CHUNK)
        ]

    def _results(self, kind: str, trial: Trial, plain: Sequence[Text], texts: Sequence[Text]) -> list[CheckResult]:
        """plain: plain decoding's texts; the first ones are what `texts` must equal."""
        return [
            self._compared(kind, trial, plain[: len(texts)], texts),
            self._teacher_forced(kind, trial, texts),
        ]

    def _compared(self, kind: str, trial: Trial, plain: Sequence[Text], texts: Sequence[Text]) -> CheckResult:
        """Compare each text with plain decoding's. They may diverge at a token that is a tie on this machine; what follows is
        not compared."""
        noise, num_tied, different = self._setting.noise, 0, list[tuple[int, int]]()
        for index, (a, b) in enumerate(zip(plain, texts, strict=True)):
            if a.tokens != b.tokens:
                position = common_prefix(a.output_ids, b.output_ids)
                if noise > 0 and self._is_tie(a, b, position):
                    num_tied += 1
                else:
                    different.append((index, position))
        count, first = len(texts), different[0] if different else None
        detail = f"{count - num_tied - len(different)} of {count} texts identical to plain decoding's"
        if num_tied:
            detail += f", {num_tied} diverge at a tie"
        if first:
            detail += f", text {first[0] + 1} differs from token {first[1] + 1} onwards"
        alarm = f"ties of up to {2 * noise:.1e} in the logits are allowed" if noise else "no false alarms"
        odds = f"{alarm}; a fault in {1 - 0.01 ** (1 / count):.0%} of such texts is found with probability 0.99"
        figures = {"num_tied": num_tied, "num_different": len(different), "first_difference": first}
        return CheckResult(
            "identity", kind, count, num_tokens(texts), trial.record.num_drafted, not different, detail, odds, figures
        )

    def _teacher_forced(self, kind: str, trial: Trial, texts: Sequence[Text]) -> CheckResult:
        """Compare each token with the choice of an independent pass. Where they differ, the margin of the choice over the token
        must not be wider than a tie."""
        margins, num_wrong = list[float](), 0
        for batch, logits in read_whole(self._model, texts):
            rows = rows_of(batch)
            written = [token for text in batch for token in text.output_ids]
            pairs = zip(choose(logits, rows).ids, written, strict=True)
            for r, (chosen, token) in enumerate(pairs):
                if chosen != token:
                    margins.append(_margin(logits[r], rows[r], chosen, token))
                    num_wrong += margins[-1] > self._tolerance(rows[r])
        count, num_missed, worst = num_tokens(texts), len(margins), max(margins, default=0.0)
        detail = f"{count - num_missed:,} of {count:,} tokens are the choice of an independent pass"
        if num_missed:
            tie = 2 * self._setting.noise
            detail += f"; the widest margin of the others is {worst:.2g} ({tie:.2g} would be a tie)"
        figures = {"num_missed": num_missed, "num_wrong": num_wrong, "worst_margin": finite(worst)}
        return CheckResult(
            "teacher-forced", kind, len(texts), count, trial.record.num_drafted, not num_wrong,
            detail, "no chance involved", figures,
        )  # fmt: skip

    def _is_tie(self, a: Text, b: Text, position: int) -> bool:
        """Whether both texts' tokens at this output position are the choice of an independent pass, up to a tie."""
        if position >= min(len(a.output_ids), len(b.output_ids)):
            return False
        ((texts, logits),) = read_whole(self._model, [a.up_to(position + 1)])
        row = rows_of(texts)[-1]
        best = choose(logits[-1:], [row]).ids[0]
        gaps = (_margin(logits[-1], row, best, text.output_ids[position]) for text in (a, b))
        return all(gap <= self._tolerance(row) for gap in gaps)

    def _tolerance(self, row: Row) -> float:
        """How wide a tie may be: both tokens' logits may be off."""
        temperature = row.sampler.params.temperature
        return 2 * self._setting.noise / (1.0 if row.sampler.is_greedy or not temperature else min(1.0, temperature))


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
