"""The common part of the EAGLE-3 formats. Here tensors already have the names of heads/eagle.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PretrainedConfig

from foredraft.errors import ModelError
from foredraft.heads.config import Ambiguity, EagleConfig, HeadCheckpoint, TargetShape
from foredraft.heads.vocabulary import VocabularyTable, read_table
from foredraft.model.taps import is_tap

_TABLES = ("d2t", "t2d")


class Taps(NamedTuple):
    """taps: those chosen. candidates: all that the file may mean, the chosen ones first."""

    taps: tuple[int, ...]
    candidates: tuple[tuple[int, ...], ...]


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The taps for a file that names none: the inputs of layers 2, L // 2 and L - 3, which every program uses."""
    return (2, num_layers // 2, num_layers - 3)


def taps_of(ids: Sequence[int] | None, target: TargetShape, offset: int) -> Taps:
    """ids: as the file gives them; None: it gives none. offset: what to add to an id, by the format's own convention.

    Programs disagree by one about what an id counts, so the neighbouring taps are candidates too.
    Raises ModelError if the target has no such layers.
    """
    taps = default_taps(target.num_layers) if ids is None else tuple(each + offset for each in ids)
    if not _are_taps(taps, target):
        raise ModelError(f"it reads the hidden states {list(taps)}, but the target has {target.num_layers} layers")
    shifted = (tuple(each + by for each in taps) for by in (1, -1))
    return Taps(taps, (taps, *(each for each in shifted if _are_taps(each, target))))


def checkpoint_of(
    layer: PretrainedConfig,
    tensors: dict[str, Tensor],
    target: TargetShape,
    *,
    taps: Taps,
    draft_vocab_size: int,
    ambiguities: Iterable[Ambiguity] = (),
    notes: Iterable[str] = (),
    **settings: Any,
) -> HeadCheckpoint:
    """settings: the other fields of EagleConfig."""
    table = read_table(tensors.get("d2t"), tensors.get("t2d"), draft_vocab_size, layer.vocab_size)
    weights = {name: tensor for name, tensor in tensors.items() if name not in _TABLES}
    config = EagleConfig(
        kind="eagle3",
        layer=layer,
        taps=taps.taps,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_ids=table.target_ids,
        num_fused_layers=_num_fused(layer, weights),
        fc_bias="fc.bias" in weights,
        owns_embeddings="embed_tokens.weight" in weights,
        owns_lm_head="lm_head.weight" in weights,
        training_len=getattr(layer, "max_position_embeddings", None),
        ambiguities=(Ambiguity("taps", taps.candidates), *_of_table(table), *ambiguities),
        **settings,
    )
    return HeadCheckpoint(config, weights, (*table.notes, *notes))


def _are_taps(taps: Sequence[int], target: TargetShape) -> bool:
    return all(tap >= 0 and is_tap(tap, target.num_layers) for tap in taps)


def _num_fused(layer: PretrainedConfig, weights: dict[str, Tensor]) -> int:
    """The number of layers that also read the embedding: all of them in some files, only the first in most."""
    return sum(f"layers.{index}.hidden_norm.weight" in weights for index in range(layer.num_hidden_layers))


def _of_table(table: VocabularyTable) -> tuple[Ambiguity, ...]:
    return (Ambiguity("target_ids", table.candidates),) if table.candidates else ()
