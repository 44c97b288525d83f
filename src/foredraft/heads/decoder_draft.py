"""A small decoder over the target's own encoder, as the draft model of an encoder-decoder: its files, and the model built from them.

The files hold the layers and the final norm of the decoder. Embeddings, positions and lm_head are the target's. The layers are of the
target's own kind, so its configuration with fewer layers describes them fully.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, PretrainedConfig, PreTrainedModel

from foredraft.engine.sources import TokenSource
from foredraft.errors import ModelError
from foredraft.heads.attaching import TargetEnds
from foredraft.heads.files import HeadFiles
from foredraft.kernels import WeightFormat, unquantized
from foredraft.model import LanguageModel, Read
from foredraft.model.checkpoint import CONFIG
from foredraft.model.hub import config_of
from foredraft.model.language_model import Body
from foredraft.model.shared_encoder import MARK, SharedEncoderBody, shares_encoder
from foredraft.model.source_stack import DecoderStackBody, SourceStackBody

WEIGHTS = "model.safetensors"
_DECODER_LAYERS = ("num_decoder_layers", "decoder_layers")
_ENCODER_LAYERS = ("num_layers", "encoder_layers")
"""The families' names for the numbers of layers: T5 and related models, BART and related models."""

_DROPOUT = ("dropout_rate", "dropout", "attention_dropout", "activation_dropout", "decoder_layerdrop")
"""Kinds of dropout, set to 0 in training: so few layers do not overfit."""

_TABLES = ("embed_tokens.", "embed_positions.")
"""The parts of the decoder that are the target's."""


def is_decoder_draft(name: str, revision: str | None = None) -> bool:
    """Whether the checkpoint is such a decoder. name: a directory or a hub id."""
    return decoder_draft_config(name, revision) is not None


def decoder_draft_config(name: str, revision: str | None = None) -> Mapping[str, Any] | None:
    """The configuration of such a checkpoint; None for any other. name: a directory or a hub id."""
    config = config_of(name, revision)
    return config if shares_encoder(config) else None


def load_decoder_draft(
    name: str, target: LanguageModel, revision: str | None = None, weight_format: WeightFormat = unquantized
) -> LanguageModel:
    """The draft model in a directory or under a hub id, for inference, in the target's precision and on its device. If the compiled
    kernels run the target, they run the draft model too. weight_format: of its matrices there; the lm_head is the target's.

    Raises ModelError, one line that names it, for files that cannot be read or do not fit the target.
    """
    hf = _empty(target.hf, *read_layers(name, target, revision))
    hf.to(target.device, target.hf.dtype).eval().requires_grad_(False)  # before parts become the target's
    _share_tables(hf, target.hf)
    return _measured(hf, _body_of(hf, target.body, weight_format), name, target)


def new_decoder(target: LanguageModel, num_layers: int) -> PreTrainedModel:
    """A decoder to train, in float32, with random layers. It has copies of the target's tables and lm_head, which require no gradient.
    Raises ModelError for a target that has no such layers, or fewer."""
    _refuse_sound(target)
    return _trainable(target, num_layers)


def decoder_to_train(name: str, target: LanguageModel) -> PreTrainedModel:
    """A saved decoder, in the form that new_decoder returns. Raises ModelError, see load_decoder_draft."""
    return _trainable(target, *read_layers(name, target))


def save_decoder(hf: PreTrainedModel, folder: Path, target_name: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Save a decoder's own weights and configuration. target_name: for human readers of the file."""
    tensors = {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in own_weights(hf).items()}
    fields = {**hf.config.to_dict(), **MARK, "target": target_name, "dtype": str(dtype).removeprefix("torch.")}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def own_weights(hf: PreTrainedModel) -> dict[str, Tensor]:
    """The decoder's layers and final norm, by their names in the decoder."""
    return {name: weight for name, weight in hf.get_decoder().state_dict().items() if not name.startswith(_TABLES)}


def num_decoder_layers(config: PretrainedConfig) -> int:
    """The number of decoder layers. Raises ModelError for a configuration of another family."""
    return int(getattr(config, _field_of(config, _DECODER_LAYERS)))


def why_not_for(config: Mapping[str, Any], model_type: str) -> str | None:
    """Why a decoder with this configuration cannot draft for a target of this type; None if it may."""
    kind = config.get("model_type")
    if kind == model_type:
        return None
    return f"it is a decoder over the encoder of a {kind}, but the target is a {model_type}"


def read_layers(name: str, target: LanguageModel, revision: str | None = None) -> tuple[int, HeadFiles]:
    """-> the number of layers, and the files with their weights. Raises ModelError."""
    files = HeadFiles.of(name, revision)
    config, own = files.config, target.hf.config
    if not shares_encoder(config):
        raise ModelError(f"{name}: its files do not hold a decoder over a target's encoder")
    _refuse_sound(target)
    problem = why_not_for(config, own.model_type)
    if problem is not None:
        raise ModelError(f"{name}: {problem}")
    num_layers = config.get(_field_of(own, _DECODER_LAYERS))
    if not isinstance(num_layers, int):
        raise ModelError(f"{name}: its {CONFIG} does not say how many layers its decoder has")
    return num_layers, files


def _field_of(config: PretrainedConfig, names: Sequence[str]) -> str:
    found = next((name for name in names if hasattr(config, name)), None)
    if found is None:
        raise ModelError(
            f"{config.model_type}: a decoder over the target's encoder works only with T5, BART and related models"
        )
    return found


def _refuse_sound(target: LanguageModel) -> None:
    if target.traits.feature_shape is not None:
        raise ModelError(
            f"{target.traits.name}: a decoder over the target's encoder works only with targets that read text"
        )


def _trainable(target: LanguageModel, num_layers: int, files: HeadFiles | None = None) -> PreTrainedModel:
    hf = _empty(target.hf, num_layers, files).requires_grad_(False)
    ends = TargetEnds(target.hf)
    with torch.no_grad():
        hf.get_output_embeddings().weight.copy_(ends.lm_head_rows(None))
        embedding = hf.get_decoder().embed_tokens.weight
        embedding.copy_(ends.embed(torch.arange(len(embedding), device=target.device)))
    _copy_positions(hf, target.hf)
    for name, parameter in hf.get_decoder().named_parameters():
        parameter.requires_grad_(not name.startswith(_TABLES))
    return hf


def _empty(target: PreTrainedModel, num_layers: int, files: HeadFiles | None) -> PreTrainedModel:
    """A model like the target, but without encoder layers, in float32. files: with the decoder's weights; None: random weights."""
    config = copy.deepcopy(target.config)
    field = _field_of(config, _DECODER_LAYERS)
    most = int(getattr(config, field))
    if not 1 <= num_layers <= most:
        raise ModelError(
            f"a decoder over the target's encoder must have 1 to {most} layers (the target has {most}), not {num_layers}"
        )
    setattr(config, field, num_layers)
    setattr(config, _field_of(config, _ENCODER_LAYERS), 0)
    for name in _DROPOUT:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    config.dtype = torch.float32
    hf: PreTrainedModel = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager")
    if files is not None:
        _load(hf, files)
    return hf


def _load(hf: PreTrainedModel, files: HeadFiles) -> None:
    own, weights = own_weights(hf), files.tensors
    wrong = sorted(own.keys() ^ weights.keys()) or sorted(n for n in own if own[n].shape != weights[n].shape)
    if wrong:
        raise ModelError(
            f"{files.name}: {wrong[0]} is missing, unknown or of a different shape: the decoder belongs to another target"
        )
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(weights[name])


def _share_tables(hf: PreTrainedModel, target: PreTrainedModel) -> None:
    """Replace modules of the draft model by the target's own."""
    sources = {id(hf.get_output_embeddings()): target.get_output_embeddings()}
    for name in ("embed_tokens", "embed_positions"):
        table = getattr(hf.get_decoder(), name, None)
        if table is not None:
            sources[id(table)] = getattr(target.get_decoder(), name)
    sources.setdefault(id(hf.get_input_embeddings()), target.get_input_embeddings())
    for path, module in list(hf.named_modules(remove_duplicate=False)):
        if id(module) in sources:
            hf.set_submodule(path, sources[id(module)])
    for name, buffer in target.named_buffers(recurse=False):  # BART's bias of the logits
        setattr(hf, name, buffer)


def _copy_positions(hf: PreTrainedModel, target: PreTrainedModel) -> None:
    table: nn.Module | None = getattr(hf.get_decoder(), "embed_positions", None)
    if table is not None:
        table.load_state_dict(target.get_decoder().embed_positions.state_dict())
    for name, buffer in target.named_buffers(recurse=False):
        setattr(hf, name, buffer.float().clone())


def _body_of(hf: PreTrainedModel, target: Body, weight_format: WeightFormat) -> Body:
    """The draft model's body, of the same kind as `target`, the target's."""
    if isinstance(target, SourceStackBody):
        return DecoderStackBody(hf, target.family, target.head, target.kernels, weight_format)
    return SharedEncoderBody(hf)


def _measured(hf: PreTrainedModel, body: Body, name: str, target: LanguageModel) -> LanguageModel:
    """The draft model, with its measured cache bytes per token in its traits."""
    traits: Any = replace(target.traits, name=name, bytes_per_token=0, bytes_per_source_token=0, shares_encoder=True)
    model = LanguageModel(hf, traits, body)
    cache = model.scratch_cache([len(traits.start_ids)], sources=[TokenSource((0,))])
    source = cache.source(0)
    assert source is not None
    source.encoded = torch.zeros(1, target.hf.get_encoder().config.hidden_size, dtype=hf.dtype, device=hf.device)
    model.read([Read(0, list(traits.start_ids), 1)], cache)
    per_token, per_source = cache.region(0).bytes_per_token, source.bytes_per_token
    return LanguageModel(hf, replace(traits, bytes_per_token=per_token, bytes_per_source_token=per_source), body)
