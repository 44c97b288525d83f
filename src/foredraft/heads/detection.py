"""Detecting whether a checkpoint is a head, from its configuration and the names of its tensors. No weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.heads.files import HeadFiles, tensor_names, weight_files
from foredraft.heads.formats import FORMATS, dflash
from foredraft.heads.formats.base import KIND_KEY
from foredraft.model.hub import config_of

_EAGLE_KEYS = (KIND_KEY, "eagle_config", "eagle_aux_hidden_state_layer_ids", "draft_vocab_size")
_METHODS = {kind: form.method for form in FORMATS for kind in form.kinds}
_MEDUSA_KEYS = ("medusa_num_heads", "medusa_num_layers")


def head_method_of(name: str, revision: str | None = None) -> str | None:
    """The method that drafts with this checkpoint: "eagle", "peagle", "dflash", "medusa" or "early_exit"; None if it is not a head, or
    cannot be read.

    name: a directory or a hub id. For a hub id only the configuration is inspected; if the format does not show there, the user must
    give method=.
    """
    config = config_of(name, revision)
    if not Path(name).is_dir():
        return _method_by_config(config)
    try:
        files = HeadFiles(name, config, _without_weights(Path(name)))
    except Exception:  # loading it reports what is wrong
        return _method_by_config(config)
    form = next((form for form in FORMATS if form.matches(files)), None)
    return None if form is None else form.method


def _without_weights(folder: Path) -> dict[str, Tensor]:
    """Empty tensors under the names in the weight files."""
    names: list[str] = []
    for path in weight_files(folder):
        names += tensor_names(path)
    return dict.fromkeys(names, torch.empty(0, device="meta"))


def _method_by_config(config: Mapping[str, Any]) -> str | None:
    kind = config.get(KIND_KEY)
    if kind in _METHODS:
        return _METHODS[kind]
    block_method = dflash.method_of_architectures(config.get("architectures"))
    if block_method is not None:
        return block_method
    if config.get("model_type") == "medusa" or any(key in config for key in _MEDUSA_KEYS):
        return "medusa"
    if config.get("model_type") == "eagle" or any(key in config for key in _EAGLE_KEYS):
        return "eagle"
    return None
