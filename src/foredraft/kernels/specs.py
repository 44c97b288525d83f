"""Sampling and verification parameters, in the form that the compiled library reads."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.kernels.structs import (
    AdjustmentBatchStruct,
    AdjustmentsStruct,
    TokenProbsStruct,
    VerificationBatchStruct,
)
from foredraft.kernels.weights import PackedMatrix, address

_DRAW_SPEC = struct.Struct("4q4f")  # DrawSpec in structs.h
_GREEDY, _DRAWN, _SHARED = 0, 1, 2  # Choice
_GREEDY_SPEC = _DRAW_SPEC.pack(_GREEDY, 0, 0, 0, 0.0, 1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Adjustments:
    """Changes to the logits of one sequence, before the temperature: penalties for the tokens so far, then biases, then bans.

    ids: [N] int64, the distinct tokens so far, the num_prompt_ids of the prompt first. counts: [N] int64, how often each is in the
    output. repetition, frequency, presence: the penalties, which generated tokens get as well. biased: [B] int64 ids, to whose logits
    biases [B] float32 are added. banned: [K] int64 ids, each of which is banned for the first banned_tokens [K] int64 generated tokens.
    """

    ids: Tensor
    counts: Tensor
    num_prompt_ids: int
    repetition: float
    frequency: float
    presence: float
    biased: Tensor
    biases: Tensor
    banned: Tensor
    banned_tokens: Tensor

    @property
    def struct(self) -> AdjustmentsStruct:
        """Valid as long as this object."""
        tensors = (self.ids, self.counts, self.biased, self.biases, self.banned, self.banned_tokens)
        return AdjustmentsStruct(
            *(tensor.data_ptr() for tensor in tensors),
            *(len(self.ids), self.num_prompt_ids, len(self.biased), len(self.banned)),
            *(self.repetition, self.frequency, self.presence),
        )


_NO_CHANGES = AdjustmentsStruct(repetition=1.0)


class DrawSpec(NamedTuple):
    """How the tokens of one sequence are chosen: the likeliest (temperature 0), or from softmax(logits / temperature), truncated,
    with noise for each token.

    truncation: (top_k, top_p, min_p), or None to keep every id. uniforms: in [0, 1), one for each token to draw. keys: one for each
    token, of the noise that drafter and verifier share (see sampling/noise.py). adjustments: of the logits, where a model chooses
    several tokens in one call; other calls get logits that have been adjusted.
    """

    temperature: float = 0.0
    truncation: tuple[int, float, float] | None = None
    uniforms: Sequence[float] = ()
    keys: Sequence[int] = ()
    adjustments: Adjustments | None = None

    @property
    def is_drawn(self) -> bool:
        return len(self.uniforms) > 0


class PackedDrawSpecs:
    """Draw specs as bytes. num_prob_rows: the number of drawn tokens over all specs. truncates: whether any spec that draws
    truncates."""

    def __init__(self, specs: Sequence[DrawSpec]) -> None:
        self.num_prob_rows, self.truncates = 0, False
        if not any(spec.temperature for spec in specs):
            self.rows, self.uniforms, self.keys = _GREEDY_SPEC * len(specs), b"", b""
            return
        rows: list[bytes] = []
        uniforms: list[float] = []
        keys: list[int] = []
        for spec in specs:
            if spec.temperature == 0:
                rows.append(_GREEDY_SPEC)
                continue
            top_k, top_p, min_p = spec.truncation or (0, 1.0, 0.0)
            kind = _DRAWN if spec.is_drawn else _SHARED
            first = len(uniforms) if kind == _DRAWN else len(keys)
            rows.append(_DRAW_SPEC.pack(kind, first, self.num_prob_rows, top_k, spec.temperature, top_p, min_p, 0.0))
            uniforms += spec.uniforms
            keys += spec.keys
            if kind == _DRAWN:
                self.num_prob_rows += len(spec.uniforms)
                self.truncates |= spec.truncation is not None
        self.rows = b"".join(rows)
        self.uniforms = struct.pack(f"{len(uniforms)}d", *uniforms)
        self.keys = struct.pack(f"{len(keys)}q", *keys)


def adjustments_struct(
    each: Sequence[Adjustments | None], columns: Tensor | None, num_ids: int
) -> AdjustmentBatchStruct | None:
    """None if there are no adjustments. columns: see columns_of; None: columns are ids. num_ids: the size of the vocabulary."""
    if all(adjustments is None for adjustments in each):
        return None
    structs = [_NO_CHANGES if adjustments is None else adjustments.struct for adjustments in each]
    return AdjustmentBatchStruct((AdjustmentsStruct * len(structs))(*structs), address(columns), num_ids)


def columns_of(column_ids: Tensor | None, num_ids: int) -> Tensor | None:
    """The column of each id [num_ids] int64, -1 for ids without one. column_ids: [D] int64, the id of each column; None: columns are ids,
    and so is the result."""
    if column_ids is None:
        return None
    columns = torch.full((num_ids,), -1, dtype=torch.int64)
    columns[column_ids] = torch.arange(len(column_ids))
    return columns


@dataclass(frozen=True, slots=True)
class MarkovFactors:
    """What token t adds to the logits of the next token: row t of the first factor times the second factor.

    first: [V, rank] float32. second: [D, rank]. target_ids: [D] int64, the id, below V, of each column of the logits; None: columns
    are ids. columns: of the ids [V], as columns_of. Raises ValueError for other shapes, dtypes or ids.
    """

    first: Tensor
    second: PackedMatrix
    target_ids: Tensor | None = None
    columns: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        if self.first.dtype != torch.float32 or not self.first.is_contiguous():
            raise ValueError(f"the first Markov factor must be contiguous float32, not {self.first.dtype}")
        if self.target_ids is not None:
            self._check_ids(self.target_ids)
        object.__setattr__(self, "columns", columns_of(self.target_ids, len(self.first)))

    def _check_ids(self, ids: Tensor) -> None:
        if ids.dtype != torch.int64 or ids.shape != (self.second.out_features,) or not ids.is_contiguous():
            raise ValueError(f"each of the {self.second.out_features} columns needs an int64 id")
        if not 0 <= int(ids.min()) <= int(ids.max()) < len(self.first):
            raise ValueError(f"columns must stand for ids below {len(self.first)}")


class Chains(NamedTuple):
    """Chains of tokens to be chosen one after the other. Chain c has lens[c] >= 1 tokens, with the rows of logits from first_rows[c]
    on. previous: the token before each chain's first."""

    first_rows: Sequence[int]
    lens: Sequence[int]
    previous: Sequence[int]


RULES = ("rejection", "block")
"""Verification rules for sampled drafts, numbered as in structs.h."""


@dataclass(frozen=True, slots=True)
class VerificationBatch:
    """Sequences with sampled draft tokens to verify.

    first_rows: the first of the rows of logits of each sequence, which has one more than draft tokens. ids: the draft tokens of each.
    prob_rows: their rows of probs (-1: a point mass). specs: the target's. rules: of RULES. probs: [R, C] float32, draft distributions
    over kept_ids [R, C] (None: over all ids). uniforms: in [0, 1), two for each sequence.
    """

    first_rows: Sequence[int]
    ids: Sequence[Sequence[int]]
    prob_rows: Sequence[Sequence[int]]
    specs: Sequence[DrawSpec]
    rules: Sequence[str]
    probs: Tensor
    kept_ids: Tensor | None
    uniforms: Sequence[float]


class VerificationResult(NamedTuple):
    """num_accepted, next_ids: one for each sequence. bad_rows: rows of logits with a NaN. stops: [B, K + 1], the probability of each
    number of accepted tokens."""

    num_accepted: list[int]
    next_ids: list[int]
    bad_rows: list[int]
    stops: array[float]


def new_token_probs(
    specs: PackedDrawSpecs, vocab_size: int, column_ids: Tensor | None
) -> tuple[TokenProbsStruct | None, Tensor | None, Tensor | None, object]:
    """Buffers for the distributions of drawn tokens: the struct, probs [R, W] and the ids of their columns [R, W] (None: columns are ids),
    and an object to keep alive with the struct. W is the number of ids to choose from, those of column_ids [W] or vocab_size, because the
    number of kept ids is not known; unwritten memory costs nothing."""
    if specs.num_prob_rows == 0:
        return None, None, None, None
    width = vocab_size if column_ids is None else len(column_ids)
    probs = torch.empty(specs.num_prob_rows, width)
    kept = array("q", [0]) * specs.num_prob_rows
    kept_ids = torch.empty(specs.num_prob_rows, width, dtype=torch.int64) if specs.truncates else None
    struct = TokenProbsStruct(probs.data_ptr(), address(kept_ids), kept.buffer_info()[0], width)
    if kept_ids is None and column_ids is not None:
        return struct, probs, column_ids.expand(specs.num_prob_rows, width), kept
    return struct, probs, kept_ids, kept


def verification_struct(batch: VerificationBatch) -> tuple[VerificationBatchStruct, tuple[object, ...]]:
    """The struct, and the objects that must live as long as it is used."""
    rules = [RULES.index(rule) for rule in batch.rules]
    lens = list(map(len, batch.ids))
    max_len = max(lens)
    specs, uniforms = array("q", PackedDrawSpecs(batch.specs).rows), array("d", batch.uniforms)
    numbers = [array("q", batch.first_rows), array("q", lens), specs, array("q", rules)]
    numbers += [_padded(batch.ids, max_len), _padded(batch.prob_rows, max_len)]
    probs, kept_ids = batch.probs.float(), batch.kept_ids
    if probs.stride(1) != 1:
        probs = probs.contiguous()
    if kept_ids is not None and kept_ids.stride(1) != 1:
        kept_ids = kept_ids.contiguous()
    struct = VerificationBatchStruct(
        *(each.buffer_info()[0] for each in numbers),
        probs.data_ptr(),
        address(kept_ids),
        uniforms.buffer_info()[0],
        len(lens),
        max_len,
        probs.shape[1],
        probs.stride(0),
        0 if kept_ids is None else kept_ids.stride(0),
    )
    return struct, (numbers, uniforms, probs, kept_ids)


def _padded(rows: Sequence[Sequence[int]], width: int) -> array[int]:
    numbers = array("q")
    for row in rows:
        numbers.extend([*row, *[0] * (width - len(row))])
    return numbers
