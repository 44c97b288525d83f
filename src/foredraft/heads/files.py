"""The files of a head: a configuration and tensors, from a directory or the hub."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from foredraft.errors import ModelError, one_line
from foredraft.model.checkpoint import CONFIG, refuse_unusable
from foredraft.model.diagnosis import why_not_found
from foredraft.model.quantized.dense import read_dense
from foredraft.model.quantized.tensors import UnreadableError

_PATTERNS = (CONFIG, "*.safetensors", "*.bin", "*.pt", "*.index.json")
_INDEX = ".index.json"
_WEIGHTS = (
    "model.safetensors",
    "medusa_lm_head.safetensors",
    f"model.safetensors{_INDEX}",
    "pytorch_model.bin",
    "medusa_lm_head.pt",
    f"pytorch_model.bin{_INDEX}",
)
"""The files that may hold the weights, or list those that do, the preferred ones first."""

QUANTIZATION = "quantization_config"
"""The key in config.json that says how matrices are quantised."""

_BUFFER = ".rotary_emb.inv_freq"
"""Old files hold the frequencies of rotary embeddings, which follow from the configuration."""


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """name: as the user gave it. config: the contents of config.json. tensors: by their names in the file. Quantised matrices are
    dequantised, and their settings are removed from the configuration. is_quantized: whether there were such settings."""

    name: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    is_quantized: bool = False

    @classmethod
    def of(cls, name: str, revision: str | None = None) -> HeadFiles:
        """name: a directory or a hub id. Raises ModelError for files that are missing or cannot be read."""
        folder = folder_of(name, revision)
        with reading(name):
            config = _config_of(folder)
            settings = config.pop(QUANTIZATION, None)
            tensors = _tensors_of(folder) if settings is None else read_dense(folder, settings)
            return cls(name, config, _without_buffers(tensors), settings is not None)


@contextmanager
def reading(name: str) -> Iterator[None]:
    """While the files of this name are read, whatever they make a library raise becomes a ModelError that gives the name."""
    try:
        yield
    except (ModelError, UnreadableError) as error:
        raise ModelError(f"{name}: {error}") from error
    except Exception as error:
        raise ModelError(f"{name}: the head cannot be read: {one_line(error)}; download it again") from error


class CheckpointTensors:
    """The tensors of a model's checkpoint, to be read by name. Raises ModelError if there are none; see reading."""

    def __init__(self, folder: Path) -> None:
        self._files = {key: path for path in weight_files(folder) for key in tensor_names(path)}

    @property
    def names(self) -> list[str]:
        return list(self._files)

    def read(self, wanted: Iterable[str]) -> dict[str, Tensor]:
        """The tensors of these names; names that the checkpoint does not have are skipped."""
        tensors: dict[str, Tensor] = {}
        names = [name for name in wanted if name in self._files]
        for path in sorted({self._files[name] for name in names}):
            inside = [name for name in names if self._files[name] == path]
            if path.suffix == ".safetensors":
                with safe_open(path, "pt") as stream:
                    tensors |= {name: stream.get_tensor(name) for name in inside}
            else:
                held = _read(path)
                tensors |= {name: held[name] for name in inside}
        return tensors


def tensor_names(path: Path) -> list[str]:
    """The names of the tensors in a file of weights, without reading them."""
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as stream:
            return list(stream.keys())
    return list(torch.load(path, map_location="meta", weights_only=True))


def folder_of(name: str, revision: str | None) -> Path:
    """A directory, or that of a hub id, whose files are fetched. Raises ModelError if there are none."""
    if Path(name).is_dir():
        return Path(name)
    refuse_unusable(name)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_PATTERNS), ignore_patterns=["*/*"]))
    except Exception as error:
        raise ModelError(f"{name}: {why_not_found(name, error, revision)}") from error


def _config_of(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise ModelError(f"there is no {CONFIG} in this directory; give the head's whole directory")
    config = json.loads(path.read_bytes())
    if not isinstance(config, dict):
        raise ModelError(f"its {CONFIG} is not a JSON object; download it again")
    return config


def _tensors_of(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        tensors |= _read(path)
    return tensors


def _without_buffers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(_BUFFER)}


def weight_files(folder: Path) -> Iterator[Path]:
    """The files of one copy of the weights; safetensors are preferred. Raises ModelError if there are none."""
    found = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if found is None:
        names = ", ".join(name for name in _WEIGHTS if not name.endswith(_INDEX))
        raise ModelError(f"no weights in this directory; it should hold one of {names}")
    if not found.name.endswith(_INDEX):
        yield found
    else:
        yield from (folder / name for name in sorted(set(json.loads(found.read_bytes())["weight_map"].values())))


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ModelError(f"{path.name}, which its index lists, is missing; download it again")
    if path.suffix == ".safetensors":
        tensors: dict[str, Any] = load_file(path)
    else:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ModelError(f"{path.name} is not a state dict: it holds something other than named tensors")
    return tensors
