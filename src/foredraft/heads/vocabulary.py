"""Reduced vocabularies: which ids of the target a head's columns stand for.

`d2t` has one number for each column. By the format it is an offset: column i stands for the target's id i + d2t[i]. Some files hold
the ids themselves. `t2d` marks the ids that have a column. Columns are in the order of their ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.errors import ModelError


class VocabularyTable(NamedTuple):
    """target_ids: [D] int64, or None: the first D ids. candidates: all possible readings of the file, if there are several. notes:
    what a user should know."""

    target_ids: Tensor | None
    candidates: tuple[Tensor, ...] = ()
    notes: tuple[str, ...] = ()


def read_table(d2t: Tensor | None, t2d: Tensor | None, draft_vocab_size: int, vocab_size: int) -> VocabularyTable:
    """vocab_size: as the head's file gives it. Raises ModelError for a reduced vocabulary without a usable table."""
    if draft_vocab_size == vocab_size and _is_blank(d2t):
        return VocabularyTable(None)
    if d2t is None and t2d is None:
        raise ModelError(
            f"it drafts {draft_vocab_size} of {vocab_size} ids, but has no d2t table to say which; add the table it was "
            "trained with"
        )
    _check_shapes({"d2t": (d2t, draft_vocab_size), "t2d": (t2d, vocab_size)})
    marked = None if t2d is None or bool(t2d.all()) else t2d.bool().nonzero().flatten()
    if d2t is None:
        return _from_marks(marked, draft_vocab_size)
    if _is_blank(d2t) and marked is None:
        raise ModelError(
            "its d2t holds only zeros and t2d marks no part of the vocabulary: the table was never filled in"
        )
    d2t = d2t.long()
    offsets, ids = d2t + torch.arange(draft_vocab_size), d2t
    readings = [reading for reading in (offsets, ids) if _fits(reading, marked, vocab_size)]
    if not readings:
        raise ModelError(
            f"its d2t is not a table{_against(t2d)}: it holds neither offsets nor ids in ascending order below {vocab_size}"
        )
    notes = ("d2t holds ids of the target, not offsets",) if readings[0] is ids else ()
    return VocabularyTable(readings[0], tuple(readings) if len(readings) > 1 else (), notes)


def to_target_vocabulary(logits: Tensor, target_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Map logits [n, D] to the target's vocabulary, [n, vocab_size]. Ids without a column get -inf.
    target_ids: [D], or None: columns are ids, and those past the vocabulary are cut."""
    num_columns = logits.shape[1]
    if target_ids is None and num_columns >= vocab_size:
        return logits[:, :vocab_size]
    whole = logits.new_full((logits.shape[0], vocab_size), -torch.inf)
    whole[:, slice(num_columns) if target_ids is None else target_ids] = logits
    return whole


TOKEN_MAP = "token_map"
"""The tensor with the ids of a reduced vocabulary in the files of vLLM."""


def mapped_ids(token_map: Tensor | None, draft_vocab_size: int | None, vocab_size: int) -> Tensor | None:
    """The ids of a vocabulary of vLLM's, in any order; None if it is not reduced. Raises ModelError if it is, without a usable token_map."""
    if draft_vocab_size is None or draft_vocab_size == vocab_size:
        return None
    if token_map is None:
        raise ModelError(f"it drafts {draft_vocab_size} of {vocab_size} ids, but has no {TOKEN_MAP} to say which")
    return check_ids(token_map, TOKEN_MAP, draft_vocab_size, vocab_size)


def reduced(lm_head: Tensor, target_ids: Tensor | None) -> Tensor:
    """Cut an lm_head over the whole vocabulary down to the drafted ids. target_ids: None for all."""
    return lm_head if target_ids is None or len(lm_head) == len(target_ids) else lm_head[target_ids]


def check_ids(ids: Tensor, name: str, draft_vocab_size: int, vocab_size: int) -> Tensor:
    """A table that holds ids in any order, as int64 [draft_vocab_size]. Raises ModelError unless they are distinct ids of the
    vocabulary."""
    _check_shapes({name: (ids, draft_vocab_size)})
    ids = ids.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(set(ids.tolist())) < len(ids):
        raise ModelError(
            f"its {name} is not a table: it should hold {draft_vocab_size} different ids below {vocab_size}"
        )
    return ids


def _is_blank(d2t: Tensor | None) -> bool:
    return d2t is None or not bool(d2t.any())


def _check_shapes(tables: Mapping[str, tuple[Tensor | None, int]]) -> None:
    for name, (table, size) in tables.items():
        if table is not None and tuple(table.shape) != (size,):
            raise ModelError(f"its {name} has the shape {list(table.shape)}, but should have [{size}]")


def _from_marks(marked: Tensor | None, draft_vocab_size: int) -> VocabularyTable:
    if marked is None or len(marked) != draft_vocab_size:
        raise ModelError(
            f"it has no d2t, and its t2d does not mark {draft_vocab_size} ids; add the table it was trained with"
        )
    return VocabularyTable(
        marked, notes=("there is no d2t; its vocabulary consists of the ids that t2d marks, in order",)
    )


def _fits(ids: Tensor, marked: Tensor | None, vocab_size: int) -> bool:
    if marked is not None:
        return torch.equal(ids, marked)
    rises = bool((ids[1:] > ids[:-1]).all())
    return rises and int(ids[0]) >= 0 and int(ids[-1]) < vocab_size


def _against(t2d: Tensor | None) -> str:
    return "" if t2d is None else " of the ids that t2d marks"
