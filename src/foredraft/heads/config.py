"""Descriptions of heads, independent of the format of their checkpoints.

A head drafts from hidden states of the target. There are five kinds: an EAGLE head is one or more decoder layers with their own keys
and values; MTP layers are further layers of the target's own family; a DFlash head is decoder layers over keys and values computed
from hidden states; a Medusa head is a few independent blocks on one hidden state; an early exit is a norm after one of the target's
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
    """The shape of the target, which a head must fit. vocab_size: the width of the target's logits."""

    num_layers: int
    hidden_size: int
    vocab_size: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> TargetShape:
        text = config.get_text_config()
        return cls(text.num_hidden_layers, text.hidden_size, text.vocab_size)


class Ambiguity(NamedTuple):
    """A setting that a file leaves open: it is missing and its default differs between programs, or programs interpret it
    differently. field: its name in the config class. candidates: possible values of that field; the first one was chosen."""

    field: str
    candidates: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The settings that all heads have.

    taps: the hidden states of the target that the head reads (see model/taps.py), concatenated in this order.
    vocab_size: the width of the target's logits. draft_vocab_size: the width D of the head's own logits.
    target_ids: [D] int64, the id in the target's vocabulary of each column; None: the columns are the target's first D ids.
    owns_lm_head: whether the file has one; otherwise the target's is used.
    logit_scale: the factor that logits are multiplied by.
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

    layer: these layers, as transformers describes them: widths, norms, rotary embedding, and the family in `model_type`. Its
    num_hidden_layers is the number of layers in the file.
    owns_embeddings: whether the file has embeddings; otherwise the target's are used.
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
        """How many tokens a row of this layer sees, its own included; None: all."""
        types = getattr(self.layer, "layer_types", None)
        if types is None or types[layer] != "sliding_attention":
            return None
        window: int | None = self.layer.sliding_window
        return window

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values per token, over all layers."""
        per_layer = 2 * self.layer.num_key_value_heads * self.layer.head_dim
        return int(self.num_layers * per_layer * dtype.itemsize)


@dataclass(frozen=True, kw_only=True)
class EagleConfig(LayeredConfig):
    """EAGLE-1 and 2 (arXiv:2401.15077, arXiv:2406.16858; one kind of weights), EAGLE-3 (arXiv:2503.01840) and 3.1.

    layer: of the family "llama", or "qwen3", which normalises queries and keys.
    num_fused_layers: how many layers, from the first on, read the token's embedding next to the state, [2 * hidden_size] together.
    EAGLE-1 has none: its fc reads both.
    applies_fc: whether features go through fc; some programs skip it if the widths already agree. fc_bias: whether fc has a bias.
    norm_before_fc: one norm over all features. fc_norm: a norm for each tap (EAGLE-3.1). At most one of the two is true.
    norm_before_residual: whether the residual of a fused layer is the normalised state.
    norm_output: whether the state that is fed back has passed the final norm (EAGLE-3.1).
    input_norm: whether layer 0 normalises its input. final_norm: whether a norm precedes the lm_head. EAGLE-1 has neither.
    projects_features: whether the features pass through a matrix of their own before the fc of EAGLE-1. Then they may come from several
    layers, and from a target of another width.
    mask_token: the id in rows of tokens that are not written yet, for a head that drafts in one pass (P-EAGLE, arXiv:2602.01469);
    None: the head does not.
    training_len: the maximum length of its training texts, if the file gives one. It does not limit positions.
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

    @property
    def fuses_features(self) -> bool:
        """Whether a matrix makes states of the features, before the first layer and EAGLE-1's own fc."""
        return self.projects_features or (self.kind != "eagle1" and self.applies_fc)


def projected_eagle1(layer: PretrainedConfig, taps: tuple[int, ...], target: TargetShape) -> EagleConfig:
    """EAGLE-1 with its own norms, embeddings and lm_head, over hidden states of several layers."""
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
    """DSpark's correction (arXiv:2607.05147): the previous token is mapped to an offset of all logits of a place, by two factors of this
    rank. kind: "vanilla", "gated" by the place's state, or "rnn", which depends on all previous tokens."""

    rank: int
    kind: Literal["vanilla", "gated", "rnn"] = "vanilla"


class Selector(NamedTuple):
    """DFlash-2's correction: each of the top_k tokens of a place is scored with the previous token, by two tables of this rank."""

    rank: int
    top_k: int


class Refiner(NamedTuple):
    """XPress's correction: a small layer of this rank mixes each place with those before it, given the token before each. mlp_size: of
    its MLP."""

    rank: int
    mlp_size: int


CorrectionForm = Markov | Selector | Refiner


class Convolution(NamedTuple):
    """DFlash-2's convolutions before and after attention and MLP, over the last num_taps rows of a block. group_size: the number of
    channels that share what a row adds to the kernel."""

    num_taps: int
    group_size: int


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(LayeredConfig):
    """Block drafters with injected features: DFlash (z-lab) and related heads.

    layer: of Qwen3's form.
    block_size: the rows of a block: the pending token, then mask tokens. mask_token: their id.
    drafts_from_anchor: whether the row of the pending token drafts too, so that each row drafts the token after its own position;
    otherwise only the mask rows draft, each the token at its own position.
    is_causal: for each layer, whether a row of the block sees no later rows.
    window_from_block: whether a sliding window is counted back from the start of the block for all its rows, and not from each row.
    correction: adjusts the logits place by place, given the previous token. convolution: within the block.
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
        """The maximum length of a draft."""
        return self.block_size - self.first_row

    @property
    def first_row(self) -> int:
        """The first row of the block that drafts."""
        return 0 if self.drafts_from_anchor else 1


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """Medusa (arXiv:2401.10774): head h drafts the token h + 2 places after the one whose hidden state it reads.

    num_blocks: residual blocks of each head. block_bias: whether their linear layers have a bias.
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

    layer: how many of them. is_trained: whether the exit has its own norm, and its own adapter if adapter_size is above 0;
    otherwise the target's final norm follows. norm_bias: whether norms have a bias.
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

    layer: the target's configuration, for these layers alone. parts: the modules they are made of. cache_width: how many numbers the
    cache keeps per token and layer.
    hidden_first: whether the projection reads the hidden state before the embedding, and not after it.
    """

    parts: DecoderParts = field(compare=False, repr=False)
    cache_width: int
    hidden_first: bool = False
    taps: tuple[int, ...] = (FINAL_NORM,)
    owns_lm_head: bool = False
    kind: Literal["mtp"] = "mtp"

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values per token, over all layers."""
        return self.num_layers * self.cache_width * dtype.itemsize


AnyHeadConfig = EagleConfig | DFlashConfig | MedusaConfig | ExitConfig | MtpConfig


@dataclass(frozen=True)
class HeadCheckpoint:
    """A head that was read from a file. tensors: by their names in the module (such as heads/eagle.py).
    notes: what a user should know about how the file was read, one line each. form: the name of the file format. is_quantized: whether
    the matrices in the file are quantised."""

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
        """Whether it drafts part of the vocabulary with the target's lm_head."""
        return not self.config.owns_lm_head and self.config.target_ids is not None

    def with_lm_head(self, rows: Tensor) -> HeadCheckpoint:
        """The same head with its own lm_head, [D, H], such as the target's rows of the ids that it drafts."""
        return replace(self.with_settings(owns_lm_head=True), tensors={**self.tensors, "lm_head.weight": rows})
