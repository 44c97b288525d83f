"""What a head is: one description for the checkpoints of every form.

A head drafts from hidden states of the target. Five kinds of description: an EAGLE head is one or more decoder layers with
keys and values of their own, MTP layers are more layers of the target's own family, a DFlash head has some over keys and values that
hidden states give, a Medusa head a few independent blocks on one hidden state, and an early exit a norm behind one of the target's
own layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig

from foredraft.model.structure import DecoderParts
from foredraft.model.taps import FINAL_NORM


class TargetShape(NamedTuple):
    """What a head must fit. vocab_size: the width of the target's logits."""

    num_layers: int
    hidden_size: int
    vocab_size: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> TargetShape:
        text = config.get_text_config()
        return cls(text.num_hidden_layers, text.hidden_size, text.vocab_size)


class Ambiguity(NamedTuple):
    """A setting that a file leaves open: it is not there and its default differs between programs, or programs read it
    differently. candidates: values of the description's field of that name; the first one was chosen."""

    field: str
    candidates: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """What all heads have.

    taps: the hidden states of the target that the head reads (see model/taps.py), concatenated in this order.
    vocab_size: of the target's logits. draft_vocab_size: the width D of the head's own.
    target_ids: [D] int64, the id in the target's vocabulary of each column; None: the columns are the target's first D ids.
    owns_lm_head: whether the file has one; otherwise the target's is used.
    logit_scale: by which logits are multiplied.
    ambiguities: settings that the file leaves open.
    """

    taps: tuple[int, ...]
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    target_ids: Tensor | None = field(default=None, repr=False, compare=False)
    owns_lm_head: bool = True
    logit_scale: float = 1.0
    ambiguities: tuple[Ambiguity, ...] = field(default=(), compare=False)

    @property
    def feature_size(self) -> int:
        """The width of the features of one token."""
        return len(self.taps) * self.target_hidden_size


@dataclass(frozen=True, kw_only=True)
class LayeredConfig(HeadConfig):
    """A head of decoder layers.

    layer: these layers, as transformers describes them: widths, norms, rotary embedding, and in `model_type` the family. Its
    num_hidden_layers is the number of layers in the file.
    owns_embeddings: whether the file has some; otherwise the target's are used.
    """

    layer: PretrainedConfig = field(compare=False)
    owns_embeddings: bool = False

    @property
    def hidden_size(self) -> int:
        return int(self.layer.hidden_size)

    @property
    def num_layers(self) -> int:
        return int(self.layer.num_hidden_layers)

    def window(self, layer: int) -> int | None:
        """How many tokens, its own included, a row of this layer sees; None: all."""
        types = getattr(self.layer, "layer_types", None)
        if types is None or types[layer] != "sliding_attention":
            return None
        window: int | None = self.layer.sliding_window
        return window

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Of keys and values, over all layers."""
        per_layer = 2 * self.layer.num_key_value_heads * self.layer.head_dim
        return int(self.num_layers * per_layer * dtype.itemsize)


@dataclass(frozen=True, kw_only=True)
class EagleConfig(LayeredConfig):
    """EAGLE-1 and 2 (arXiv:2401.15077, arXiv:2406.16858; one kind of weights), EAGLE-3 (arXiv:2503.01840) and 3.1.

    layer: of the family "llama", or "qwen3", which normalizes queries and keys.
    num_fused_layers: the first so many layers read the embedding of the token beside the state, [2 * hidden_size] together.
    EAGLE-1 has none: its fc reads both.
    applies_fc: whether features go through fc; some programs leave it out where widths already agree. fc_bias: of fc.
    norm_before_fc: one norm over all features. fc_norm: a norm for each tap (EAGLE-3.1). At most one of the two.
    norm_before_residual: whether the residual of a fused layer is the normalized state.
    norm_output: whether the state fed back has passed the final norm (EAGLE-3.1).
    input_norm: whether layer 0 normalizes its input. final_norm: whether a norm precedes the lm_head. EAGLE-1 has neither.
    projects_features: whether the features pass through a matrix of their own before the fc of EAGLE-1. Then they may be of several
    layers, and of a target of another width.
    mask_token: the id of rows that stand for tokens not written yet, in a head that drafts in one pass (P-EAGLE, arXiv:2602.01469);
    None: it does not.
    training_len: the longest text it was trained on, where the file gives one. No limit on positions.
    """

    kind: Literal["eagle1", "eagle3"]
    num_fused_layers: int = 1
    applies_fc: bool = True
    fc_bias: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    input_norm: bool = True
    final_norm: bool = True
    projects_features: bool = False
    mask_token: int | None = None
    training_len: int | None = None

    @property
    def family(self) -> str:
        return str(self.layer.model_type)


def projected_eagle1(layer: PretrainedConfig, taps: tuple[int, ...], target: TargetShape) -> EagleConfig:
    """EAGLE-1 with the norms, embeddings and lm_head of a draft model, that reads states of several layers."""
    return EagleConfig(
        kind="eagle1",
        layer=layer,
        taps=taps,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        num_fused_layers=0,
        fc_norm=True,
        norm_output=True,
        projects_features=True,
        owns_embeddings=True,
        training_len=layer.max_position_embeddings,
    )


class Markov(NamedTuple):
    """DSpark's correction (arXiv:2607.05147): the token drafted before a place adds to all its logits, by two factors of this rank.
    kind: "vanilla", "gated" by the place's state, or "rnn", which goes by all tokens drafted before."""

    rank: int
    kind: Literal["vanilla", "gated", "rnn"] = "vanilla"


class Selector(NamedTuple):
    """DFlash-2's: of the top_k tokens of a place, each is scored with the one drafted before, by two tables of this rank."""

    rank: int
    top_k: int


class Refiner(NamedTuple):
    """XPress's: a small layer of this rank mixes the places up to its own, by the tokens drafted before each. mlp_size: of its MLP."""

    rank: int
    mlp_size: int


CorrectionForm = Markov | Selector | Refiner


class Convolution(NamedTuple):
    """DFlash-2's, before and after attention and MLP: over this many rows of a block, up to its own. group_size: channels that share
    what a row adds to the kernel."""

    num_taps: int
    group_size: int


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(LayeredConfig):
    """A block drafter with injected features (DFlash, z-lab), and its kin.

    layer: of Qwen3's form.
    block_size: rows of a block: the pending token, and mask tokens. mask_token: their id.
    drafts_from_anchor: whether the row of the pending token drafts too, and each row the token behind its own position; otherwise the
    rows of the mask draft, each the token of its own position.
    is_causal: for each layer, whether a row of the block sees no later ones.
    window_from_block: whether a sliding window is counted back from the block, for all its rows alike, and not from each row.
    correction: a step from place to place, which brings in the token drafted before. convolution: within the block.
    """

    block_size: int
    mask_token: int
    is_causal: tuple[bool, ...]
    drafts_from_anchor: bool = False
    window_from_block: bool = False
    correction: CorrectionForm | None = None
    convolution: Convolution | None = None
    kind: Literal["dflash", "dflash2", "dspark", "xpress"] = "dflash"

    @property
    def num_places(self) -> int:
        """The most tokens of a draft."""
        return self.block_size - self.first_row

    @property
    def first_row(self) -> int:
        """Of the block, that drafts."""
        return 0 if self.drafts_from_anchor else 1


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """Medusa (arXiv:2401.10774): head h drafts the token h + 2 places after the one whose hidden state it reads.

    num_blocks: residual blocks of each head. block_bias: whether their linear layers have one.
    shares_lm_head: whether all heads use one lm_head.
    """

    num_heads: int
    num_blocks: int = 1
    block_bias: bool = True
    shares_lm_head: bool = False
    taps: tuple[int, ...] = (FINAL_NORM,)
    kind: Literal["medusa"] = "medusa"


@dataclass(frozen=True, kw_only=True)
class ExitConfig(HeadConfig):
    """An early exit (arXiv:2404.16710): the target's first layers draft, sharing weights, keys and values.

    layer: how many of them. is_trained: whether it has a norm, and an adapter where adapter_size is above 0, of its own;
    otherwise the target's final norm follows. norm_bias: whether norms have one.
    """

    layer: int
    is_trained: bool = True
    adapter_size: int = 0
    norm_bias: bool = False
    taps: tuple[int, ...] = ()
    owns_lm_head: bool = False
    kind: Literal["early_exit"] = "early_exit"


@dataclass(frozen=True, kw_only=True)
class MtpConfig(LayeredConfig):
    """Multi-token prediction layers of the target's own checkpoint (DeepSeek-V3, arXiv:2412.19437).

    layer: the target's configuration, for these layers alone. parts: what they are made of. cache_width: numbers that the cache keeps
    of a token in each layer.
    hidden_first: whether the projection reads the hidden state before the embedding, and not behind it.
    """

    parts: DecoderParts = field(compare=False, repr=False)
    cache_width: int
    hidden_first: bool = False
    taps: tuple[int, ...] = (FINAL_NORM,)
    owns_lm_head: bool = False
    kind: Literal["mtp"] = "mtp"

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Of keys and values, over all layers."""
        return self.num_layers * self.cache_width * dtype.itemsize


AnyHeadConfig = EagleConfig | DFlashConfig | MedusaConfig | ExitConfig | MtpConfig


@dataclass(frozen=True)
class HeadCheckpoint:
    """A head that was read from a file. tensors: by their names in the module (heads/eagle.py, heads/medusa.py).
    notes: what a user should know of how the file was read, a line each. form: whose files they are, by name. is_quantized: whether
    the file has its matrices in few bits."""

    config: AnyHeadConfig
    tensors: Mapping[str, Tensor]
    notes: tuple[str, ...] = ()
    form: str = ""
    is_quantized: bool = False

    def with_settings(self, **settings: Any) -> HeadCheckpoint:
        """The same weights with other settings, such as a candidate of an ambiguity."""
        return replace(self, config=replace(self.config, **settings))

    @property
    def borrows_rows(self) -> bool:
        """Whether it drafts a part of the vocabulary with the target's lm_head."""
        return not self.config.owns_lm_head and self.config.target_ids is not None

    def with_lm_head(self, rows: Tensor) -> HeadCheckpoint:
        """An EAGLE head with an lm_head of its own, [D, H]: the target's rows of the ids that it drafts, say."""
        return replace(self.with_settings(owns_lm_head=True), tensors={**self.tensors, "lm_head.weight": rows})
