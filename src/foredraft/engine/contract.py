"""Checks of the contract between a drafter and the engine: when the engine is made, and for every proposal."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.engine.proposal import CERTAIN, DraftRequest, Proposal
from foredraft.engine.token_tree import ROOT
from foredraft.errors import DrafterError, shown

SUM_TOLERANCE = 1e-3
_METHODS = {"propose": "requests", "forget": "seq_ids"}


def check_drafter(drafter: object) -> None:
    """Raises DrafterError for an object that cannot be a drafter."""
    if isinstance(drafter, type):
        name = drafter.__name__
        raise DrafterError(f"{name} is a class, but a drafter must be an object: give {name}(...)")
    name = type(drafter).__name__
    for method, argument in _METHODS.items():
        bound = getattr(drafter, method, None)
        if not callable(bound):
            raise DrafterError(f"{name} has no {method}: a drafter needs propose(requests) and forget(seq_ids)")
        if not _takes_one(bound):
            raise DrafterError(f"{name}.{method} must take one argument: {method}({argument})")
    taps = getattr(drafter, "taps", ())
    if not isinstance(taps, tuple | list) or not all(type(tap) is int for tap in taps):
        raise DrafterError(f"{name}.taps must be a tuple of the numbers of layers, not {shown(taps)}")


def check_proposal(drafter: object, proposal: object, requests: Sequence[DraftRequest], vocab_size: int) -> None:
    """The cheap checks of a proposal. Raises DrafterError if it breaks the contract."""
    name = type(drafter).__name__
    if not isinstance(proposal, Proposal):
        raise DrafterError(f"{name}.propose must return a foredraft.Proposal, not {type(proposal).__name__}")
    for field, tensor in proposal.given_tensors.items():
        _check_ids(name, field, tensor)
    if proposal.num_rows != len(requests):
        raise DrafterError(
            f"{name} proposed {proposal.num_rows} rows for {len(requests)} requests: give one row for each"
        )
    _check_probs(name, proposal, vocab_size)
    for b, (request, row) in enumerate(zip(requests, proposal.draft_ids, strict=True)):
        if len(row) > request.max_len:
            raise DrafterError(f"{name} proposed {len(row)} tokens in row {b}, but its max_len is {request.max_len}")
    bad = _outside(proposal.draft_ids, 0, vocab_size)
    if bad is not None:
        b, token = bad
        raise DrafterError(f"{name} proposed id {token} in row {b}: valid ids are 0 to {vocab_size - 1}")
    _check_trees(name, proposal)
    if proposal.is_certain:
        return
    num_prob_rows = 0 if proposal.probs is None else len(proposal.probs)
    bad = _outside(proposal.draft_prob_rows, CERTAIN, num_prob_rows)
    if bad is not None:
        b, prob_row = bad
        raise DrafterError(
            f"{name} named row {prob_row} of probs in row {b}, but probs has {num_prob_rows} rows: "
            f"use {CERTAIN} for a token that was certain"
        )


def _check_trees(name: str, proposal: Proposal) -> None:
    for b, parents in enumerate(proposal.parents or ()):
        if parents is None:
            continue
        ids = proposal.draft_ids[b]
        bad = next((node for node, parent in enumerate(parents) if not ROOT <= parent < node), None)
        if bad is not None:
            raise DrafterError(
                f"{name} named {parents[bad]} as the parent of token {bad} in row {b}: it must be an earlier token, or {ROOT}"
            )
        if len(set(zip(parents, ids, strict=True))) < len(ids):
            raise DrafterError(f"{name} proposed the same id twice after one parent in row {b}: siblings must differ")
        if any(row != CERTAIN for row in proposal.draft_prob_rows[b]):
            raise DrafterError(
                f"{name} proposed a tree with sampled tokens in row {b}: a tree's tokens must be certain ({CERTAIN})"
            )


def check_probs(drafter: object, proposal: Proposal) -> None:
    """The checks that read probs: each row that an id names sums to 1 and gives that id a probability above 0. Raises DrafterError."""
    token_probs = proposal.token_probs
    if token_probs is None:
        return
    name = type(drafter).__name__
    sampled = proposal.drafted & (proposal.prob_rows != CERTAIN)
    rows, ids = proposal.prob_rows[sampled], proposal.ids[sampled]
    named = token_probs.probs.cpu()[rows].to(torch.float64)
    bad = (~((named.sum(-1) - 1).abs() <= SUM_TOLERANCE)).nonzero()[:, 0].tolist()
    if bad:
        total = float(named[bad[0]].sum())
        raise DrafterError(f"{name}: row {int(rows[bad[0]])} of probs sums to {total:.6g}, but must sum to 1")
    if bool((named < 0).any()):
        raise DrafterError(f"{name}: probs contains a negative number, but must contain probabilities")
    # not TokenProbs.at, which sorts whole rows
    is_id = ids[:, None] == (torch.arange(named.shape[1]) if token_probs.ids is None else token_probs.ids.cpu()[rows])
    if not bool((is_id & (named > 0)).any(-1).all()):
        raise DrafterError(f"{name} proposed an id whose probability is 0 in the row of probs that it names")


def _outside(rows: Sequence[Sequence[int]], least: int, end: int) -> tuple[int, int] | None:
    """The first number that is not in [least, end), and its row. None: all are."""
    if all(least <= min(row) and max(row) < end for row in rows if row):
        return None
    return next((b, number) for b, row in enumerate(rows) for number in row if not least <= number < end)


def _takes_one(method: object) -> bool:
    try:
        inspect.signature(method).bind(object())  # type: ignore[arg-type]
    except TypeError:
        return False
    except ValueError:  # a built-in without a signature
        return True
    return True


def _check_ids(name: str, field: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.int64 or tensor.device.type != "cpu":
        raise DrafterError(
            f"{name}: {field} of its proposal must be int64 on the CPU, not {tensor.dtype} on {tensor.device}"
        )


def _check_probs(name: str, proposal: Proposal, vocab_size: int) -> None:
    probs, kept_ids = proposal.probs, proposal.kept_ids
    if probs is None:
        return
    if probs.ndim != 2 or not probs.is_floating_point():
        raise DrafterError(
            f"{name}: probs must be [R, V] of a floating-point type, not {tuple(probs.shape)} of {probs.dtype}"
        )
    if kept_ids is None and probs.shape[1] != vocab_size:
        raise DrafterError(f"{name}: probs has {probs.shape[1]} columns, but the vocabulary has {vocab_size} ids")
    if kept_ids is not None and kept_ids.shape != probs.shape:
        raise DrafterError(
            f"{name}: kept_ids {tuple(kept_ids.shape)} must have the shape of probs {tuple(probs.shape)}"
        )
    if kept_ids is not None:
        _check_kept_ids(name, kept_ids, vocab_size)


def _check_kept_ids(name: str, kept_ids: Tensor, vocab_size: int) -> None:
    """Ids on another device are not read, because that would wait for it."""
    if kept_ids.dtype != torch.int64:
        raise DrafterError(f"{name}: kept_ids must be int64, not {kept_ids.dtype}")
    if kept_ids.device.type != "cpu" or not kept_ids.numel():
        return
    rows = kept_ids[:1] if kept_ids.stride(0) == 0 else kept_ids  # one row, shown several times, is read once
    least, most = map(int, rows.aminmax())
    if least < 0 or most >= vocab_size:
        bad = least if least < 0 else most
        raise DrafterError(f"{name}: kept_ids has the id {bad}, but valid ids are 0 to {vocab_size - 1}")
