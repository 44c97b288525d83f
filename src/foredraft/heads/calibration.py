"""Choosing settings that a head's files leave open, by how many draft tokens the target would accept with each on a short text.

Programs number layers differently and have different defaults for missing settings. A head that runs with the wrong ones raises no
error, but drafts badly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foredraft.heads.config import Ambiguity, AnyHeadConfig, DFlashConfig, HeadCheckpoint
from foredraft.heads.module import Embed, LMHead
from foredraft.heads.on_texts import PlainHead, drafts_on_text, plain_head
from foredraft.heads.options import setting_of
from foredraft.model.batch import Read
from foredraft.model.language_model import LanguageModel

TEXT = """\
Question: How does a bicycle stay upright when it moves?
Answer: A moving bicycle stays upright because the rider, and the shape of the bicycle itself, steer it into the fall. When it \
leans to the left, the front wheel turns a little to the left as well. The wheels then move under the weight again, and the lean \
is corrected. This happens many times in a minute, and the rider hardly notices it. At low speed there is less time to correct \
each lean, so it is harder to ride slowly than to ride fast.

Question: Write a function in Python that adds up the even numbers of a list.
Answer: Here is a function that does this:

def sum_of_even_numbers(numbers):
    total = 0
    for number in numbers:
        if number % 2 == 0:
            total += number
    return total

It looks at each number in turn. If the number can be divided by two, it is added to the total. For the list [1, 2, 3, 4] the \
result is 6.
"""
"""The text that the target reads. A fixed text costs one pass; generating one would cost a pass per token."""

MIN_TOKENS = 4
MAX_TOKENS = 256
_MAX_ROWS = 1024
"""The maximum rows of a block drafter's pass."""

_NUM_DRAFTED = 2
_NUM_ERRORS = 2.0
_LEAST_GAIN = 0.005
"""Settings other than the files' must gain more than this many accepted draft tokens, and more than _NUM_ERRORS standard errors."""

_Choice = tuple[int, ...]
"""The index of a candidate for each ambiguity."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """num_tokens: of the text. accepted: [rows] for each combination of candidates, the expected number of accepted draft tokens, out
    of two, at temperature 1. chosen: the combination kept."""

    ambiguities: Sequence[Ambiguity]
    num_tokens: int
    accepted: Mapping[_Choice, Tensor]
    chosen: _Choice

    @property
    def fields(self) -> dict[str, Any]:
        """The chosen values, by field of the configuration."""
        return {each.field: each.candidates[i] for each, i in zip(self.ambiguities, self.chosen, strict=True)}

    @property
    def keeps_defaults(self) -> bool:
        return not any(self.chosen)

    def __str__(self) -> str:
        """One line: the chosen settings, their accepted draft tokens, and those of each alternative candidate in their place."""
        others = [
            f"{self._settings({place: index})} {self._mean(_with(self.chosen, place, index)):.3f}"
            for place, ambiguity in enumerate(self.ambiguities)
            for index in range(len(ambiguity.candidates))
            if index != self.chosen[place]
        ]
        everything = self._settings(dict(enumerate(self.chosen)))
        origin = (
            "as in its files"
            if self.keeps_defaults
            else f"with the settings in its files: {self._mean((0,) * len(self.chosen)):.3f}"
        )
        return (
            f"uses {everything}: {self._mean(self.chosen):.3f} of {_NUM_DRAFTED} draft tokens accepted on {self.num_tokens} tokens of "
            f"text ({origin}); others: {', '.join(others)}"
        )

    def _mean(self, choice: _Choice) -> float:
        return float(self.accepted[choice].mean())

    def _settings(self, choices: Mapping[int, int]) -> str:
        named = (setting_of(*self.ambiguities[place], index) for place, index in choices.items())
        return json.dumps(dict(named))


def calibrate(
    checkpoint: HeadCheckpoint, target: LanguageModel, embed: Embed, lm_head: LMHead, text: Sequence[int]
) -> Calibration:
    """Try every combination of candidates. The files' own is kept unless another one is clearly better.

    text: at least MIN_TOKENS tokens; the first MAX_TOKENS are read, in one pass of the target. embed, lm_head: the target's.
    """
    ambiguities = checkpoint.config.ambiguities
    reading = _read(target, text[: min(MAX_TOKENS, target.traits.context_len)], _all_taps(checkpoint))
    # not in bfloat16 on a CPU: without instructions for it, PyTorch's products of many rows take six times as long there
    dtype = torch.float32 if target.device.type == "cpu" else target.hf.dtype
    checkpoint = replace(checkpoint, tensors={name: tensor.to(dtype) for name, tensor in checkpoint.tensors.items()})

    def borrowed_lm_head(x: Tensor) -> Tensor:
        return lm_head(x.to(target.hf.dtype)).float()

    accepted = {}
    for choice in _combinations(ambiguities):
        fields = {each.field: each.candidates[i] for each, i in zip(ambiguities, choice, strict=True)}
        head = plain_head(checkpoint.with_settings(**fields), embed, borrowed_lm_head, dtype).to(target.device)
        accepted[choice] = _num_accepted(head, reading)
    return Calibration(ambiguities, len(reading.tokens), accepted, _best(accepted))


class _TargetReading(NamedTuple):
    """tokens: N of them. features: [N, H] for each tap. probs: [N, V], of the token after each."""

    tokens: Sequence[int]
    features: Mapping[int, Tensor]
    probs: Tensor


def _all_taps(checkpoint: HeadCheckpoint) -> list[int]:
    """The taps of all candidates."""
    open_taps = [each.candidates for each in checkpoint.config.ambiguities if each.field == "taps"]
    return sorted({tap for taps in (checkpoint.config.taps, *sum(open_taps, ())) for tap in taps})


def _read(target: LanguageModel, tokens: Sequence[int], taps: Sequence[int]) -> _TargetReading:
    cache = target.scratch_cache([len(tokens)], taps)
    logits = target.read([Read(0, tokens, len(tokens))], cache)
    features = cache.features(0)
    assert features is not None
    parts = features.clone().chunk(len(taps), dim=-1)
    return _TargetReading(tokens, dict(zip(taps, parts, strict=True)), torch.softmax(logits.float(), dim=-1))


@torch.inference_mode()
def _num_accepted(head: PlainHead, reading: _TargetReading) -> Tensor:
    """The expected number of accepted draft tokens, of two after each position, [rows]. A token is accepted with probability
    Σ min(p, q) (arXiv:2211.17192), the second one only if the first is."""
    features = torch.cat([reading.features[tap] for tap in head.config.taps], dim=-1).to(head.dtype)
    ids, rows = torch.tensor(reading.tokens, device=features.device), _rows(head.config, len(reading.tokens))
    reached, expected = torch.ones(len(rows)), torch.zeros(len(rows))
    for step, logits in enumerate(drafts_on_text(head, features, ids, rows.to(features.device), _NUM_DRAFTED)):
        q = torch.softmax(head.on_target(logits.float()), dim=-1)
        p = reading.probs[(rows + step + 1).to(q.device)]
        reached = reached * torch.minimum(p, q).sum(-1).cpu()
        expected = expected + reached
    return expected


def _rows(config: AnyHeadConfig, num_tokens: int) -> Tensor:
    """The positions to draft after: not all of them for a block drafter, which reads many rows for each."""
    size = config.block_size if isinstance(config, DFlashConfig) else 1
    return torch.arange(0, num_tokens - _NUM_DRAFTED, -(-num_tokens * size // _MAX_ROWS))


def _combinations(ambiguities: Sequence[Ambiguity]) -> list[_Choice]:
    """All combinations, those that differ least from the files first."""
    choices = product(*(range(len(each.candidates)) for each in ambiguities))
    return sorted(choices, key=lambda choice: sum(index > 0 for index in choice))


def _best(accepted: Mapping[_Choice, Tensor]) -> _Choice:
    choices = iter(accepted)
    best = next(choices)
    for choice in choices:
        if _is_clearly_better(accepted[choice], accepted[best]):
            best = choice
    return best


def _is_clearly_better(these: Tensor, those: Tensor) -> bool:
    """Compare row by row, since the same rows are easy for both. A head that gives NaN is never better."""
    gains = these - those
    error = float(gains.std()) / math.sqrt(len(gains))
    return float(gains.mean()) > max(_LEAST_GAIN, _NUM_ERRORS * error)


def _with(choice: _Choice, place: int, index: int) -> _Choice:
    return (*choice[:place], index, *choice[place + 1 :])
