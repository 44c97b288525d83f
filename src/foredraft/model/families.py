"""The decoder families that run as one kernel call, described as data: what each computes, and which modules and settings define it.

A model runs this way only if its family's description covers all of it: every module with weights, and every setting that changes the
result. The library's own code runs all other models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers.activations import ACT2FN

from foredraft.kernels import CLAMPED_SWIGLU, GELU, GELU_TANH, LAYER_NORM, RELU, RMS_NORM, SILU, StackForm
from foredraft.model.rotary import Angles, rotation_table
from foredraft.model.stored import StoredExperts, is_linear

Number = Callable[[Any], float]
"""Reads a number from a model."""

ACTIVATIONS = {
    nn.SiLU: SILU,
    type(ACT2FN["silu"]): SILU,
    type(ACT2FN["gelu_pytorch_tanh"]): GELU_TANH,
    type(ACT2FN["gelu_new"]): GELU_TANH,
    type(ACT2FN["gelu"]): GELU,
    type(ACT2FN["relu"]): RELU,
}
UNKNOWN = -1
_LAYER_TYPES = {"full_attention": False, "sliding_attention": True}


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts. router: the router's name in the MLP. are_gates_alternating: whether the rows of gate_up_proj alternate
    (gate, up, gate, up, ..) instead of starting with all gates. normalizes: whether the weights of a row's experts sum to 1."""

    router: str = "gate"
    are_gates_alternating: bool = False
    normalizes: Callable[[Any], bool] = lambda router: True


def _zero(hf: Any) -> float:
    return 0.0


def _one(hf: Any) -> float:
    return 1.0


@dataclass(frozen=True, slots=True)
class Family:
    """How a family's decoder differs from Llama's, which is the default.

    Norms: the layer's names of the norms before and after attention and the MLP. qkv, up: one name where the checkpoint joins the
    matrices. windows: where to find the number of keys that a layer sees. can_rotate_part: whether part of a head may be left unrotated.
    rotates_pairs: whether neighbours are rotated together, not halves. is_rotated: whether a layer's attention is rotated.
    """

    attention_norm: str | None = "input_layernorm"
    mlp_norm: str | None = "post_attention_layernorm"
    attention_post_norm: str | None = None
    mlp_post_norm: str | None = None
    norm_kind: int = RMS_NORM
    norm_adds_one: bool = False
    joint_head_norm: bool = False
    is_parallel: bool = False
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    is_gated: bool = True
    activation: str = "act_fn"
    mixture: Mixture | None = None
    has_sinks: bool = False
    windows: Literal["none", "layers", "config"] = "none"
    angles: Angles = "halves"
    can_rotate_part: bool = False
    rotates_pairs: bool = False
    has_table_per_layer_type: bool = False
    is_rotated: Callable[[Any], bool] = lambda attention: True
    softcap: Number = _zero
    embedding_scale: Number = _one
    residual_scale: Number = _one
    logit_scale: Number = _one
    logit_softcap: Number = _zero

    @property
    def norms(self) -> tuple[str | None, ...]:
        """The layer's names of the norms before attention and the MLP, then of those after them."""
        return self.attention_norm, self.mlp_norm, self.attention_post_norm, self.mlp_post_norm


def _gemma_embedding_scale(hf: Any) -> float:
    """The embedding scale, rounded as the library rounds it."""
    return float(torch.tensor(hf.config.hidden_size**0.5).to(hf.dtype))


def _final_softcap(hf: Any) -> float:
    return float(hf.config.final_logit_softcapping or 0.0)


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(windows="config"),
    "Qwen2ForCausalLM": Family(windows="layers"),
    "Qwen3ForCausalLM": Family(windows="layers"),
    "Gemma2ForCausalLM": Family(
        mlp_norm="pre_feedforward_layernorm",
        attention_post_norm="post_attention_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
        norm_adds_one=True,
        windows="layers",
        softcap=lambda hf: float(hf.config.attn_logit_softcapping or 0.0),
        embedding_scale=_gemma_embedding_scale,
        logit_softcap=_final_softcap,
    ),
    "Gemma3ForCausalLM": Family(
        mlp_norm="pre_feedforward_layernorm",
        attention_post_norm="post_attention_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
        norm_adds_one=True,
        windows="layers",
        has_table_per_layer_type=True,
        embedding_scale=_gemma_embedding_scale,
        logit_softcap=_final_softcap,
    ),
    "Phi3ForCausalLM": Family(
        qkv=("qkv_proj",), up=("gate_up_proj",), activation="activation_fn", windows="config", can_rotate_part=True
    ),
    "SmolLM3ForCausalLM": Family(windows="layers", is_rotated=lambda attention: bool(attention.use_rope)),
    "GraniteForCausalLM": Family(
        embedding_scale=lambda hf: float(hf.model.embedding_multiplier),
        residual_scale=lambda hf: float(hf.config.residual_multiplier),
        logit_scale=lambda hf: 1.0 / float(hf.config.logits_scaling),
    ),
    "Olmo2ForCausalLM": Family(
        attention_norm=None,
        mlp_norm=None,
        attention_post_norm="post_attention_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
        joint_head_norm=True,
    ),
    "Starcoder2ForCausalLM": Family(
        norm_kind=LAYER_NORM, up=("c_fc",), down="c_proj", is_gated=False, activation="act", windows="config"
    ),
    "MixtralForCausalLM": Family(mixture=Mixture(), windows="config"),
    "Qwen3MoeForCausalLM": Family(
        mixture=Mixture(normalizes=lambda router: bool(router.norm_topk_prob)), windows="config"
    ),
    "CohereForCausalLM": Family(
        mlp_norm=None,
        norm_kind=LAYER_NORM,
        is_parallel=True,
        angles="pairs",
        rotates_pairs=True,
        logit_scale=lambda hf: float(hf.logit_scale),
    ),
    "Cohere2ForCausalLM": Family(
        mlp_norm=None,
        norm_kind=LAYER_NORM,
        is_parallel=True,
        windows="layers",
        angles="pairs",
        rotates_pairs=True,
        is_rotated=lambda attention: attention.sliding_window is not None,
        logit_scale=lambda hf: float(hf.logit_scale),
    ),
    "Glm4ForCausalLM": Family(
        attention_post_norm="post_self_attn_layernorm",
        mlp_post_norm="post_mlp_layernorm",
        up=("gate_up_proj",),
        activation="activation_fn",
        can_rotate_part=True,
        rotates_pairs=True,
    ),
    "GptOssForCausalLM": Family(
        mixture=Mixture(router="router", are_gates_alternating=True),
        has_sinks=True,
        windows="layers",
        angles="once",
    ),
}


def family_of(hf: Any) -> Family | None:
    """The description of this model; None if there is none or it does not cover the model."""
    family = FAMILIES.get(type(hf).__name__)
    return family if family is not None and _covers(family, hf) else None


def form_of(hf: Any, family: Family) -> StackForm:
    """The StackForm of a model that its family covers."""
    attention, mlp = hf.model.layers[0].self_attn, hf.model.layers[0].mlp
    mixtures = [layer.mlp for layer in hf.model.layers if hasattr(layer.mlp, "experts")]
    router = getattr(mixtures[0], family.mixture.router) if family.mixture and mixtures else None
    experts = getattr(mlp, "experts", None)
    num_heads, num_kv_heads = head_counts(attention, family)
    return StackForm(
        num_heads,
        num_kv_heads,
        int(attention.head_dim),
        2 * rotation_table(hf, 1, family.angles, layer_types_of(hf, family)[0])[0].shape[1],
        epsilon_of(hf.model.norm),
        float(attention.scaling),
        norm_kind=family.norm_kind,
        is_parallel=family.is_parallel,
        is_gated=family.is_gated,
        activation=_activation_of(mlp, family),
        joint_head_norm=family.joint_head_norm,
        experts_per_token=0 if router is None else int(router.top_k),
        normalizes_experts=bool(family.mixture and router is not None and family.mixture.normalizes(router)),
        softcap=family.softcap(hf),
        embedding_scale=family.embedding_scale(hf),
        residual_scale=family.residual_scale(hf),
        logit_scale=family.logit_scale(hf),
        logit_softcap=family.logit_softcap(hf),
        swiglu_alpha=float(getattr(experts, "alpha", 0.0)),
        swiglu_limit=float(getattr(experts, "limit", 0.0)),
    )


def head_counts(attention: Any, family: Family) -> tuple[int, int]:
    """The number of query heads, and of key heads."""
    rows = sum(getattr(attention, name).out_features for name in family.qkv)
    num_kv_heads = rows // int(attention.head_dim) // (int(attention.num_key_value_groups) + 2)
    return num_kv_heads * int(attention.num_key_value_groups), num_kv_heads


def layer_types_of(hf: Any, family: Family) -> list[Any]:
    """The layer types that have rotary tables of their own; [None] if all layers share one table."""
    return sorted(set(hf.config.layer_types)) if family.has_table_per_layer_type else [None]


def rotary_table_of(hf: Any, family: Family, index: int) -> int:
    """The index of the table that rotates this layer; -1: none."""
    if not family.is_rotated(hf.model.layers[index].self_attn):
        return -1
    if not family.has_table_per_layer_type:
        return 0
    return layer_types_of(hf, family).index(hf.config.layer_types[index])


def window_of(hf: Any, family: Family, index: int) -> int:
    """How many keys a query of this layer sees; 0: all."""
    if family.windows == "none":
        return 0  # its configuration may name a window that the model ignores
    owner = hf.config if family.windows == "config" else hf.model.layers[index].self_attn
    return int(getattr(owner, "sliding_window", None) or 0)


def epsilon_of(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def _activation_of(mlp: Any, family: Family) -> int:
    """The kernels' number for the activation; UNKNOWN if they do not have it."""
    experts = getattr(mlp, "experts", None)
    if experts is None:
        return ACTIVATIONS.get(type(getattr(mlp, family.activation)), UNKNOWN)
    if family.mixture is not None and family.mixture.are_gates_alternating:
        return CLAMPED_SWIGLU
    return ACTIVATIONS.get(type(experts.act_fn), UNKNOWN)


def _covers(family: Family, hf: Any) -> bool:
    layers = list(hf.model.layers)
    attentions = [layer.self_attn for layer in layers]
    norms = [hf.model.norm, *(norm for layer in layers for norm in _norms_of(family, layer))]
    activations = {_activation_of(layer.mlp, family) for layer in layers}
    return (
        _children(hf) == {"model", "lm_head"}
        and _children(hf.model) == {"embed_tokens", "layers", "norm", "rotary_emb"}
        and is_linear(hf.lm_head)
        and all(_weights_of(layer) == _described(family, layer) for layer in layers)
        and all(_is_norm(norm, family) for norm in norms)
        and len({epsilon_of(norm) for norm in norms}) == 1
        and UNKNOWN not in activations
        and len(activations) == 1
        and all(attention.is_causal for attention in attentions)
        and len({(attention.head_dim, attention.scaling) for attention in attentions}) == 1
        and all(_is_window_masked(hf, family, index) for index in range(len(layers)))
        and _is_rotation_covered(hf, family)
    )


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _weights_of(layer: nn.Module) -> dict[str, str]:
    """The names of a layer's modules that have weights, with the kind of each."""
    kinds = {}
    for name, module in layer.named_modules():
        has_weights = next(module.parameters(recurse=False), None) is not None or any(
            isinstance(child, StoredExperts) for child in module.children()
        )
        if is_linear(module):
            kinds[name] = "linear"
        elif has_weights:
            kinds[name] = "norm" if type(module).__name__.endswith("Norm") else "parameters"
    return kinds


def _described(family: Family, layer: Any) -> dict[str, str]:
    """The same, according to the family's description."""
    attention, mlp = layer.self_attn, layer.mlp
    kinds = {f"self_attn.{name}": "linear" for name in (*family.qkv, "o_proj")}
    kinds |= {name: "norm" for name in family.norms if name is not None}
    kinds |= {f"self_attn.{name}": "norm" for name in ("q_norm", "k_norm") if hasattr(attention, "q_norm")}
    if family.has_sinks:
        kinds["self_attn"] = "parameters"
    if family.mixture is None or not hasattr(mlp, "experts"):
        return kinds | {f"mlp.{name}": "linear" for name in (*family.up, family.down)}
    return kinds | {f"mlp.{name}": "parameters" for name in (family.mixture.router, "experts")}


def _norms_of(family: Family, layer: Any) -> Iterator[Any]:
    yield from (getattr(layer, name) for name in family.norms if name is not None)
    if hasattr(layer.self_attn, "q_norm"):
        yield from (layer.self_attn.q_norm, layer.self_attn.k_norm)


def _is_norm(module: Any, family: Family) -> bool:
    ending = "LayerNorm" if family.norm_kind == LAYER_NORM else "RMSNorm"
    return type(module).__name__.endswith(ending)


def _is_window_masked(hf: Any, family: Family, index: int) -> bool:
    """Whether the mask of this layer, which is chosen by its type, agrees with its window."""
    if family.windows != "layers":
        return True
    layer_type = hf.config.layer_types[index]
    return _LAYER_TYPES.get(layer_type) == (window_of(hf, family, index) > 0)


def _is_rotation_covered(hf: Any, family: Family) -> bool:
    head_dim = int(hf.model.layers[0].self_attn.head_dim)
    tables = [rotation_table(hf, 1, family.angles, kind)[0] for kind in layer_types_of(hf, family)]
    widths = {2 * table.shape[1] for table in tables}
    rotary_dim = max(widths)
    return len(widths) == 1 and (rotary_dim == head_dim or (family.can_rotate_part and rotary_dim < head_dim))
