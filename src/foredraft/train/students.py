"""Where a student's shape and first weights come from."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from foredraft.errors import ForedraftError, ModelError, one_line
from foredraft.model import LoadOptions, check_vocabulary, load_tokenizer
from foredraft.model.loading import load_config, refuse_if_too_big, refuse_unsupported


def load_for_training(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedModel:
    """A checkpoint as the library makes it, in float32, nothing swapped in. Raises ModelError."""
    options = LoadOptions(revision=revision, trust_remote_code=trust_remote_code)
    config = load_config(name, options)
    refuse_unsupported(config, name)
    refuse_if_too_big(name, torch.float32, torch.device("cpu"))
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, revision=revision, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        raise ModelError(f"{name}: the checkpoint cannot be loaded: {one_line(error)}") from error
    return model


def from_architecture(file: Path, vocab_size: int | None, seed: int) -> PreTrainedModel:
    """Random weights in the shape of a config.json, or of the folder it lies in. vocab_size: what the tokenizer needs; the
    file's own is kept where it is enough.

    Raises ForedraftError for a file that describes no causal decoder.
    """
    path = file / "config.json" if file.is_dir() else file
    try:
        fields: dict[str, Any] = json.loads(path.read_bytes().decode())
        kind = fields.pop("model_type")
        config = AutoConfig.for_model(kind, **fields)
    except OSError as error:
        raise ForedraftError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ForedraftError(f"{path}: no configuration of a model: {one_line(error)}") from None
    refuse_unsupported(config, str(path))
    if vocab_size is not None and vocab_size > config.vocab_size:
        raise ForedraftError(
            f"{path}: vocab_size is {config.vocab_size}, and the tokenizer writes {vocab_size} tokens: give at least that"
        )
    return _random(config, str(path), seed)


def _random(config: PretrainedConfig, name: str, seed: int) -> PreTrainedModel:
    config.dtype = torch.float32
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        except Exception as error:
            raise ForedraftError(f"{name}: no model can be made of it: {one_line(error)}") from error
    return model.to(torch.float32)


def with_fewer_layers(target: PreTrainedModel, num_layers: int, seed: int) -> PreTrainedModel:
    """The target's own shape with num_layers of its layers, evenly chosen, the first and the last among them (one: the
    first); embeddings, final norm and head are the target's.

    Raises ForedraftError for a number that the target does not have.
    """
    config = copy.deepcopy(target.config)
    total = int(config.num_hidden_layers)
    if not 1 <= num_layers <= total:
        raise ForedraftError(f"--layers must be from 1 to the target's {total}, not {num_layers}")
    chosen = evenly(total, num_layers)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in chosen]
    student = _random(config, "the target's configuration", seed)
    return take_over_weights(student, target, chosen)


def evenly(total: int, count: int) -> list[int]:
    """count of 0..total-1, as far apart as they can be."""
    return [0] if count == 1 else [round(i * (total - 1) / (count - 1)) for i in range(count)]


def with_own_head(student: PreTrainedModel) -> PreTrainedModel:
    """The same with a head apart from its embeddings, begun as a copy of them. It takes memory and no time, and lets a shallow
    draft say what follows a token otherwise than by likeness to it."""
    config = copy.deepcopy(student.config)
    if not config.tie_word_embeddings:
        return student
    config.tie_word_embeddings = False
    free = _random(config, "the draft's configuration", 0)
    free.load_state_dict(student.state_dict())
    return free


def take_over_weights(student: PreTrainedModel, target: PreTrainedModel, layers: list[int]) -> PreTrainedModel:
    """Copies every weight whose name and shape are also the target's; the student's layer i takes those of layers[i]."""
    theirs = target.state_dict()
    with torch.no_grad():
        for name, weight in student.state_dict().items():
            found = theirs.get(_renumbered(name, layers))
            if found is not None and found.shape == weight.shape:
                weight.copy_(found)
    return student


def _renumbered(name: str, layers: list[int]) -> str:
    """model.layers.1.mlp... -> model.layers.<layers[1]>.mlp..., whatever the list of layers is called."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            index = int(part)
            parts[place] = str(layers[index]) if index < len(layers) else "none"
            break
    return ".".join(parts)


def check_draft(init: str, target_tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises VocabularyError where a draft to go on from has another vocabulary than the target."""
    check_vocabulary(target_tokenizer, load_tokenizer(init, LoadOptions()))
