"""MTP layers in a target's own checkpoint: numbered after the target's layers in DeepSeek-V3 and GLM-4.5, and in a list of their own in
MiMo. Every tensor of such layers must be accounted for."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig

from foredraft.errors import ModelError
from foredraft.heads.config import HeadCheckpoint, MtpConfig, TargetShape
from foredraft.model.structure import DecoderParts, cache_width_of

_EMBEDDINGS, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers")
_ROTARY = ("default", "linear", "llama3", "yarn")
_FULL = "full_attention"
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_UNKNOWN = re.compile(r"(^|\.)(mtp|nextn)[._]")
_BUFFER = "rotary_emb.inv_freq"


class MtpForm(NamedTuple):
    """How checkpoints name MTP layers. layers: the prefix before a layer's number. is_behind: whether numbers continue after the target's
    own layers; otherwise they begin at 0. renamed: parts outside the decoder layer -> their names in heads/mtp.py. copies: tensors that
    are copies of the target's -> the target's names. hidden_first: see MtpConfig."""

    name: str
    layers: str
    is_behind: bool
    renamed: Mapping[str, str]
    copies: Mapping[str, str]
    hidden_first: bool


DEEPSEEK = MtpForm(
    "DeepSeek-V3",
    "model.layers.",
    True,
    {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "norm"},
    {"embed_tokens.weight": _EMBEDDINGS, "shared_head.head.weight": _LM_HEAD},
    False,
)
MIMO = MtpForm(
    "MiMo",
    "model.mtp_layers.",
    False,
    {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj", "final_layernorm": "norm"},
    {},
    True,
)
_FORMS = (DEEPSEEK, MIMO)


class MtpNames(NamedTuple):
    """The tensors of MTP layers. layers: for each layer, a tensor's name after the layer's prefix -> its full name in the checkpoint."""

    form: MtpForm
    layers: tuple[dict[str, str], ...]

    @property
    def wanted(self) -> set[str]:
        """The tensors to read from the checkpoint: those of the layers, and the originals of their copies."""
        copied = {name for layer in self.layers for name in layer if name in self.form.copies}
        originals = {_EMBEDDINGS, *(self.form.copies[name] for name in copied)} if copied else set()
        return originals | {name for layer in self.layers for name in layer.values()}


def find_layers(names: Iterable[str], num_hidden_layers: int) -> MtpNames | None:
    """The MTP layers among the tensors of a target; None: there are none. Raises ModelError for layers in no known format."""
    names = list(names)
    for form in _FORMS:
        first = num_hidden_layers if form.is_behind else 0
        layers = _by_layer(form, names, first)
        parts = {name.removesuffix(".weight") for layer in layers.values() for name in layer}
        if not parts & form.renamed.keys():
            continue
        if layers.keys() != set(range(len(layers))):
            numbers = ", ".join(str(first + index) for index in sorted(layers))
            raise ModelError(f"its MTP layers should be {first}, {first + 1}, ..., but are {numbers}")
        return MtpNames(form, tuple(layers[index] for index in range(len(layers))))
    unknown = next((name for name in names if _UNKNOWN.search(name)), None)
    if unknown is not None:
        known = ", ".join(form.name for form in _FORMS)
        raise ModelError(f"it has MTP layers in an unknown format ({unknown}; supported formats: {known})")
    return None


def _by_layer(form: MtpForm, names: Iterable[str], first: int) -> dict[int, dict[str, str]]:
    """The layers numbered from `first` on, as in MtpNames, by number counted from 0."""
    pattern, layers = re.compile(re.escape(form.layers) + r"(\d+)\.(.*)"), dict[int, dict[str, str]]()
    for name in names:
        match = pattern.fullmatch(name)
        if match is not None and int(match[1]) >= first and not name.endswith(_BUFFER):
            layers.setdefault(int(match[1]) - first, {})[match[2]] = name
    return layers


def read(
    found: MtpNames, tensors: Mapping[str, Tensor], config: PretrainedConfig, parts: DecoderParts
) -> HeadCheckpoint:
    """tensors: those that `found` wants, by their names in the checkpoint. config: the target's; parts: of its decoder.

    Raises ModelError for a configuration from which such layers cannot be built, and for copies that differ from the target's tensors.
    """
    form = found.form
    weights: dict[str, Tensor] = {}
    for index, names in enumerate(found.layers):
        layer = {behind: tensors[name] for behind, name in names.items()}
        _check_copies(form, layer, tensors)
        weights |= {f"layers.{index}.{name}": tensor for name, tensor in _layer(form, layer).items()}
    layer_config = _config_of_layers(config, weights, len(found.layers))
    shape = TargetShape.of(config)
    mtp = MtpConfig(
        layer=layer_config,
        parts=parts,
        cache_width=cache_width_of(layer_config),
        hidden_first=form.hidden_first,
        target_hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        draft_vocab_size=shape.vocab_size,
    )
    return HeadCheckpoint(mtp, weights, _notes(config, len(found.layers)), form.name)


def _layer(form: MtpForm, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One layer's tensors, by the names in heads/mtp.py."""
    named = {}
    for name, tensor in tensors.items():
        part = name.removesuffix(".weight")
        if part in form.renamed:
            named[f"{form.renamed[part]}.weight"] = tensor
        elif name not in form.copies:
            named[f"block.{name}"] = tensor
    return _with_experts(named)


def _with_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stack the weights of experts, as transformers has them: gate_up_proj [E, 2 * I, H], down_proj [E, H, I]."""
    others: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            others[name] = tensor
        else:
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
    for prefix, each in experts.items():
        indices = range(1 + max(index for index, _ in each))
        missing = [
            f"{i}.{part}" for i in indices for part in ("gate_proj", "up_proj", "down_proj") if (i, part) not in each
        ]
        if missing:
            raise ModelError(f"its MTP layers lack expert weights: {missing[0]} of {prefix}")
        gates_and_ups = [torch.cat((each[i, "gate_proj"], each[i, "up_proj"])) for i in indices]
        others[f"{prefix}.gate_up_proj"] = torch.stack(gates_and_ups)
        others[f"{prefix}.down_proj"] = torch.stack([each[i, "down_proj"] for i in indices])
    return others


def _check_copies(form: MtpForm, layer: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Refuse copies that differ from the target's tensors, which are used in their place. A tied lm_head is the embeddings."""
    for name, original in form.copies.items():
        theirs = tensors.get(original, tensors.get(_EMBEDDINGS))
        if name in layer and theirs is not None and not torch.equal(layer[name], theirs):
            raise ModelError(f"{name} of its MTP layers differs from the target's {original}: that is not supported")


def _config_of_layers(config: PretrainedConfig, weights: Mapping[str, Tensor], num_layers: int) -> PretrainedConfig:
    """The target's configuration, changed so that layers 0, 1, .. are the MTP layers."""
    text = copy.deepcopy(config.get_text_config())
    kinds = getattr(text, "layer_types", None)
    if kinds is not None and set(kinds) != {_FULL}:
        raise ModelError(
            f"its layer_types are {', '.join(sorted(set(kinds)))}: MTP layers of such a target are not supported"
        )
    rotary = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotary not in _ROTARY:
        raise ModelError(f"its rotary embedding is of type {rotary}: MTP layers support only {', '.join(_ROTARY)}")
    text.num_hidden_layers = num_layers
    if kinds is not None:
        text.layer_types = [_FULL] * num_layers
    if hasattr(text, "first_k_dense_replace"):
        is_mixture = any(".mlp.experts." in name for name in weights)
        text.first_k_dense_replace = 0 if is_mixture else num_layers
    return text


def _notes(config: PretrainedConfig, num_layers: int) -> tuple[str, ...]:
    text = config.get_text_config()
    said = next((count for key in _COUNTS if (count := getattr(text, key, None)) is not None), None)
    if said is None or said == num_layers:
        return ()
    return (f"config.json specifies {said} MTP layers, but the weights have {num_layers}",)
