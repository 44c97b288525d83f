"""Makes the student of a run: its architecture and its initial weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from foredraft.errors import ForedraftError, one_line
from foredraft.model import LoadOptions, load_tokenizer
from foredraft.model.formats import open_checkpoint
from foredraft.model.loading import load_config, refuse_unsupported
from foredraft.model.memory import refuse_if_too_big
from foredraft.model.packed import dense_weights
from foredraft.model.stored import materialize
from foredraft.vocabulary import check_vocabulary

_BY_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")
"""Fields of configurations that list something for each layer."""


def load_for_training(name: str) -> PreTrainedModel:
    """Load a checkpoint as transformers does, in float32, without replacing modules. Raises ModelError."""
    options = LoadOptions()
    config = load_config(name, options)
    refuse_unsupported(config, name)
    refuse_if_too_big(name, torch.float32, torch.device("cpu"))
    model = open_checkpoint(name, options).model(config, torch.float32)
    materialize(model)
    return model.requires_grad_(True)


def from_architecture(file: Path, vocab_size: int | None, seed: int) -> PreTrainedModel:
    """A model with random weights, described by a config.json or a folder that has one. vocab_size: what the tokenizer
    needs; the file's own must be at least that.

    Raises ForedraftError for a file that describes neither a causal decoder nor an encoder-decoder.
    """
    path = file / "config.json" if file.is_dir() else file
    try:
        fields: dict[str, Any] = json.loads(path.read_bytes().decode())
        kind = fields.pop("model_type")
        config = AutoConfig.for_model(kind, **fields)
    except OSError as error:
        raise ForedraftError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ForedraftError(f"{path}: not a model configuration: {one_line(error)}") from None
    refuse_unsupported(config, str(path))
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        raise ForedraftError(f"{path}: decoder_start_token_id, with which the decoder begins, is missing")
    if vocab_size is not None and vocab_size > config.vocab_size:
        raise ForedraftError(
            f"{path}: vocab_size is {config.vocab_size}, but the tokenizer has {vocab_size} tokens: make it at least {vocab_size}"
        )
    return _random(config, str(path), seed)


def _random(config: PretrainedConfig, name: str, seed: int) -> PreTrainedModel:
    config.dtype = torch.float32
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            model: PreTrainedModel = auto.from_config(config)
        except Exception as error:
            raise ForedraftError(f"{name}: no model can be built from it: {one_line(error)}") from error
    return model.to(torch.float32)


def with_fewer_layers(target: PreTrainedModel, num_layers: int, seed: int) -> PreTrainedModel:
    """The target with only num_layers of its layers, evenly spread from the first to the last (if one: the first). Embeddings,
    final norm and lm_head are the target's.

    Raises ForedraftError for more layers than the target has, or fewer than 1, and for a target with layers of several kinds whose
    configuration cannot describe these alone.
    """
    config = copy.deepcopy(target.config)
    total = int(config.num_hidden_layers)
    if not 1 <= num_layers <= total:
        raise ForedraftError(f"--layers must be from 1 to the target's {total}, not {num_layers}")
    layers = spread_layers(total, num_layers)
    config.num_hidden_layers = num_layers
    _keep_kinds(config, layers)
    student = _random(config, "the target's configuration", seed)
    missing = _copy(student, target, layers)
    if missing:
        raise ForedraftError(
            f"--layers: the target's layers are of several kinds, and {missing[0]} of its layers {layers} would stay random: give "
            "--architecture or --init"
        )
    return student


def _keep_kinds(config: Any, layers: list[int]) -> None:
    """Change what a configuration says of single layers to what it says of these, in this order."""
    for name in _BY_LAYER:
        if getattr(config, name, None):
            setattr(config, name, [getattr(config, name)[index] for index in layers])
    if getattr(config, "mlp_only_layers", None):
        config.mlp_only_layers = [place for place, index in enumerate(layers) if index in config.mlp_only_layers]
    if getattr(config, "first_k_dense_replace", None):
        config.first_k_dense_replace = sum(index < config.first_k_dense_replace for index in layers)


def spread_layers(total: int, count: int) -> list[int]:
    """count indices of 0..total-1, as far apart as possible."""
    return [0] if count == 1 else [round(i * (total - 1) / (count - 1)) for i in range(count)]


def with_own_head(student: PreTrainedModel) -> PreTrainedModel:
    """The student with its own lm_head, initialised as a copy of the embeddings that it was tied to. It costs memory but no
    time, and a shallow draft needs it to predict next tokens that are unlike the last one."""
    config = copy.deepcopy(student.config)
    if not config.tie_word_embeddings:
        return student
    config.tie_word_embeddings = False
    untied = _random(config, "the draft's configuration", 0)
    untied.load_state_dict(student.state_dict())
    return untied


def copy_weights(student: PreTrainedModel, target: PreTrainedModel, layers: list[int]) -> PreTrainedModel:
    """Copy every weight that the target has under the same name and with the same shape, including packed ones. The student's
    layer i gets the weights of layers[i]."""
    _copy(student, target, layers)
    return student


def _copy(student: PreTrainedModel, target: PreTrainedModel, layers: list[int]) -> list[str]:
    """See copy_weights. -> the names of the weights that the target does not have"""
    target_weights, missing = dense_weights(target), []
    with torch.no_grad():
        for name, weight in student.state_dict().items():
            source = target_weights.get(_source_name(name, layers))
            if source is None or source.shape != weight.shape:
                missing.append(name)
            else:
                weight.copy_(source)
    return missing


def _source_name(name: str, layers: list[int]) -> str:
    """model.layers.1.mlp... -> model.layers.<layers[1]>.mlp..., whatever the module list is called."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.isdigit():
            index = int(part)
            parts[position] = str(layers[index]) if index < len(layers) else "none"
            break
    return ".".join(parts)


def check_draft(init: str, target_tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises VocabularyError if the draft to start from has another vocabulary than the target."""
    check_vocabulary(target_tokenizer, load_tokenizer(init, LoadOptions()))
