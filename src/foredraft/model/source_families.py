"""The encoder-decoder families whose stacks run as one kernel call each, described as data: what each computes, and which modules define
it.

As in families.py, a model runs this way only if its family's description covers all of it; the library's own code runs the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from foredraft.kernels import LAYER_NORM, RMS_NORM, StackForm
from foredraft.model.encoder_decoder import biases_of
from foredraft.model.families import ACTIVATIONS, UNKNOWN, epsilon_of
from foredraft.model.stored import is_linear


class LayerParts(NamedTuple):
    """The modules of a layer. cross, cross_norm: None in an encoder. mlp: has the linear layers. activation: the MLP's."""

    attention: Any
    attention_norm: Any
    cross: Any
    cross_norm: Any
    mlp: Any
    mlp_norm: Any
    activation: Any

    @property
    def norms(self) -> list[Any]:
        """In the order in which they run."""
        return [norm for norm in (self.attention_norm, self.cross_norm, self.mlp_norm) if norm is not None]


def _t5_parts(layer: Any) -> LayerParts:
    attention, mlp = layer.layer[0], layer.layer[-1]
    cross = layer.layer[1] if len(layer.layer) == 3 else None
    return LayerParts(
        attention.SelfAttention,
        attention.layer_norm,
        None if cross is None else cross.EncDecAttention,
        None if cross is None else cross.layer_norm,
        mlp.DenseReluDense,
        mlp.layer_norm,
        mlp.DenseReluDense.act,
    )


def _bart_parts(layer: Any) -> LayerParts:
    return LayerParts(
        layer.self_attn,
        layer.self_attn_layer_norm,
        getattr(layer, "encoder_attn", None),
        getattr(layer, "encoder_attn_layer_norm", None),
        layer,
        layer.final_layer_norm,
        layer.activation_fn,
    )


@dataclass(frozen=True, slots=True)
class SourceFamily:
    """How a family's two stacks differ from Pegasus's, which are the default.

    layers, final_norm, embedding_norm: a stack's names for them; None: there is no such norm. qkv, out: an attention's names. ups:
    alternatives for an MLP's names, of which the first that exist are used; gates come before the values that they gate. norms_residual:
    whether the norm of a part follows it and applies to the residual stream, instead of to the part's input. logit_scale: of a model.
    """

    layers: str = "layers"
    parts: Callable[[Any], LayerParts] = _bart_parts
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "out_proj"
    ups: tuple[tuple[str, ...], ...] = (("fc1",),)
    down: str = "fc2"
    norm_kind: int = LAYER_NORM
    norms_residual: bool = False
    embedding_norm: str | None = None
    final_norm: str | None = "layer_norm"
    logit_scale: Callable[[Any], float] = lambda hf: 1.0

    def up_of(self, mlp: Any) -> tuple[str, ...]:
        """The names that this MLP has."""
        return next((names for names in self.ups if all(hasattr(mlp, name) for name in names)), ())

    def layers_of(self, stack: Any) -> list[LayerParts]:
        """The layers of an encoder or a decoder."""
        return [self.parts(layer) for layer in getattr(stack, self.layers)]


def _t5_logit_scale(hf: Any) -> float:
    return (
        float(hf.model_dim) ** -0.5 if getattr(hf.config, "scale_decoder_outputs", False) else 1.0
    )  # mT5 has no such setting


def _umt5_logit_scale(hf: Any) -> float:
    return float(hf.model_dim) ** -0.5 if hf.config.tie_word_embeddings else 1.0


def _t5(logit_scale: Callable[[Any], float]) -> SourceFamily:
    return SourceFamily(
        layers="block",
        parts=_t5_parts,
        qkv=("q", "k", "v"),
        out="o",
        ups=(("wi_0", "wi_1"), ("wi",)),
        down="wo",
        norm_kind=RMS_NORM,
        final_norm="final_layer_norm",
        logit_scale=logit_scale,
    )


_BART = SourceFamily(norms_residual=True, embedding_norm="layernorm_embedding", final_norm=None)

SOURCE_FAMILIES: dict[str, SourceFamily] = {
    "T5ForConditionalGeneration": _t5(_t5_logit_scale),
    "MT5ForConditionalGeneration": _t5(_t5_logit_scale),
    "UMT5ForConditionalGeneration": _t5(_umt5_logit_scale),
    "BartForConditionalGeneration": _BART,
    "PLBartForConditionalGeneration": _BART,
    "MarianMTModel": SourceFamily(norms_residual=True, final_norm=None),
    "MBartForConditionalGeneration": SourceFamily(embedding_norm="layernorm_embedding"),
    "PegasusForConditionalGeneration": SourceFamily(),
    "BlenderbotForConditionalGeneration": SourceFamily(),
    "M2M100ForConditionalGeneration": SourceFamily(),
}


def source_family_of(hf: Any) -> SourceFamily | None:
    """The description of this model; None if there is none or it does not cover the model."""
    family = SOURCE_FAMILIES.get(type(hf).__name__)
    if family is None or not is_linear(hf.lm_head):
        return None
    stacks = (hf.get_encoder(), hf.get_decoder())
    shared = getattr(hf.base_model, "shared", None)  # the stacks look up rows in embeddings of their own
    known = {id(hf.lm_head), id(shared), *(id(module) for stack in stacks for module in _described(family, stack))}
    is_described = all(id(module) in known for module in hf.modules() if _has_weights(module))
    return family if is_described and all(_is_one_form(family, stack) for stack in stacks) else None


def source_form_of(hf: Any, stack: Any, family: SourceFamily) -> StackForm:
    """The StackForm of one of its stacks."""
    parts = family.layers_of(stack)[0]
    num_heads = _num_heads(parts.attention, family)
    return StackForm(
        num_heads,
        num_heads,
        _head_dim(parts.attention),
        0,
        epsilon_of(parts.mlp_norm),
        _scale(parts.attention),
        norm_kind=family.norm_kind,
        norms_residual=family.norms_residual,
        sees_all=parts.cross is None,
        is_gated=len(family.up_of(parts.mlp)) == 2,
        activation=ACTIVATIONS[type(parts.activation)],
        embedding_scale=_embedding_scale(stack),
        logit_scale=family.logit_scale(hf),
    )


def position_rows_of(stack: Any) -> Tensor | None:
    """The position embeddings, [positions, hidden] float32; None if positions are in attention."""
    table = getattr(stack, "embed_positions", None)
    if table is None:
        return None
    # M2M100's sinusoids start after its padding id, and BART skips the first rows
    rows: Tensor = (
        table.weights[table.padding_idx + 1 :] if hasattr(table, "weights") else table.weight[_first_row(table) :]
    )
    return rows.detach().float().contiguous()


def _first_row(table: Any) -> int:
    return int(getattr(table, "offset", 0))


def _embedding_scale(stack: Any) -> float:
    """The factor of the embeddings, which belongs to the embedding itself or to the stack."""
    owner: Any = stack.embed_tokens if hasattr(stack.embed_tokens, "embed_scale") else stack
    return float(getattr(owner, "embed_scale", 1.0))


def _head_dim(attention: Any) -> int:
    return int(getattr(attention, "head_dim", None) or attention.key_value_proj_dim)


def _num_heads(attention: Any, family: SourceFamily) -> int:
    return int(getattr(attention, family.qkv[0]).out_features) // _head_dim(attention)


def _scale(attention: Any) -> float:
    """T5 does not scale its scores."""
    return float(getattr(attention, "scaling", 1.0))


def _has_weights(module: nn.Module) -> bool:
    return is_linear(module) or next(module.parameters(recurse=False), None) is not None


def _described(family: SourceFamily, stack: Any) -> Iterator[Any]:
    """The modules with weights that a stack has according to its family's description."""
    yield from (stack.embed_tokens, getattr(stack, "embed_positions", None))
    yield from _norms_around(family, stack)
    for parts in family.layers_of(stack):
        yield from parts.norms
        for attention in (parts.attention, parts.cross):
            if attention is not None:
                yield from (getattr(attention, name) for name in (*family.qkv, family.out))
                yield getattr(attention, "relative_attention_bias", None)
        yield from (getattr(parts.mlp, name) for name in (*family.up_of(parts.mlp), family.down))


def _norms_around(family: SourceFamily, stack: Any) -> list[Any]:
    """The norms before the first layer and after the last one."""
    return [getattr(stack, name) for name in (family.embedding_norm, family.final_norm) if name is not None]


def _is_one_form(family: SourceFamily, stack: Any) -> bool:
    """Whether one set of numbers describes all layers, with an activation that the kernels have."""
    layers = family.layers_of(stack)
    attentions = [part for parts in layers for part in (parts.attention, parts.cross) if part is not None]
    kinds = {(family.up_of(parts.mlp), ACTIVATIONS.get(type(parts.activation), UNKNOWN)) for parts in layers}
    numbers = {(_num_heads(part, family), _head_dim(part), _scale(part)) for part in attentions}
    norms = [*_norms_around(family, stack), *(norm for parts in layers for norm in parts.norms)]
    epsilons = {epsilon_of(norm) for norm in norms}
    is_known = all(names and activation != UNKNOWN for names, activation in kinds)
    return is_known and len(kinds) == len(numbers) == len(epsilons) == 1


def bias_tables_of(stack: Any) -> dict[int, Tensor]:
    """By layer, [heads, 2 * farthest + 1] float32, see AttentionShape. Empty if positions are added to the embeddings."""
    with torch.inference_mode():
        return {layer: bias.table.float().contiguous() for layer, bias in biases_of(stack).items()}
