"""What a checkpoint's path alone shows. Nothing here imports PyTorch, reads a weight or contacts the hub."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from foredraft.errors import ModelError

EMBEDDED = Path(__file__).resolve().parents[1] / "embedded"

CONFIG = "config.json"
_ADAPTER = "adapter_config.json"
_GGUF = ".gguf"
_GGUF_MAGIC = b"GGUF"
_GGUF_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def is_gguf(path: Path) -> bool:
    """Whether it is a file with the suffix or the first bytes of a GGUF file."""
    return path.is_file() and (path.suffix == _GGUF or _begins_with_magic(path))


def refuse_unusable(name: str, *, has_weights: bool = True) -> None:
    """Raise ModelError, with the reason, for a path that does not exist, a file that is not a GGUF file, and a folder without a model in
    Hugging Face format. A hub id passes. has_weights: whether the weights must exist too."""
    path = Path(name)
    if path.is_file():
        reason = _why_no_file(path)
        if reason is not None:
            raise ModelError(f"{name}: {reason}")
    elif path.is_dir():
        reason = _why_no_folder(path, has_weights=has_weights)
        if reason is not None:
            raise ModelError(f"{name}: {reason}")
    elif path.suffix == _GGUF:
        raise ModelError(f"{name}: no such file; give a GGUF file, a directory in Hugging Face format, or a hub id")
    elif name.startswith(("/", ".", "~")) or not _HUB_ID.fullmatch(name):
        raise ModelError(
            f"{name}: no such directory; give a directory in Hugging Face format, a GGUF file, or a hub id"
        )


def _begins_with_magic(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return stream.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC
    except OSError:
        return False


def _why_no_file(path: Path) -> str | None:
    if _begins_with_magic(path):
        return _why_no_single_file(path)
    if path.suffix != _GGUF:
        return "this is a file; give the directory that holds config.json and the weights, or a GGUF file"
    try:
        is_empty = path.stat().st_size == 0
        path.open("rb").close()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return f"{'empty' if is_empty else 'not a GGUF file, despite its name: it does not begin with GGUF'}; download it again"


def _why_no_single_file(path: Path) -> str | None:
    part = _GGUF_PART.search(path.name)
    if part is None or int(part[2]) == 1:
        return None
    return f"part {int(part[1])} of {int(part[2])} of a model; join the parts with llama-gguf-split --merge, and give the resulting file"


def _why_no_folder(folder: Path, *, has_weights: bool) -> str | None:
    names = [file.name for file in folder.iterdir()]
    has_model = any(name.endswith(_WEIGHTS) and not name.startswith("adapter_") for name in names)
    if not has_model or CONFIG not in names:
        if _ADAPTER in names:
            return _why_no_adapter(folder)
        if any(name.endswith(_GGUF) for name in names):
            return "this is a directory of GGUF files; give one of them"
    if CONFIG not in names:
        return (
            f"not a model: there is no {CONFIG} in this directory; give a directory in Hugging Face format, or a hub id"
        )
    reason = _why_no_config(folder / CONFIG)
    if reason is None and has_weights and not has_model:
        return "no weights in this directory (model.safetensors or its parts); download the checkpoint again"
    return reason


def _why_no_adapter(folder: Path) -> str:
    base = _json(folder / _ADAPTER).get("base_model_name_or_path")
    of = f" of {base}" if isinstance(base, str) and base else ""
    return (
        f"this is a LoRA (PEFT) adapter{of}, not a complete model; merge it into its base model with peft's merge_and_unload(), save "
        "the result with its tokenizer, and give that directory"
    )


def _why_no_config(file: Path) -> str | None:
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        return f"its {CONFIG} cannot be read: {error.strerror}"
    except ValueError as error:
        return f"its {CONFIG} is not valid JSON ({error}); download the checkpoint again"
    return None if isinstance(config, dict) else f"its {CONFIG} is not a JSON object; download the checkpoint again"


def raw_config(name: str) -> dict[str, Any]:
    """The contents of a folder's config.json, without defaults; empty if it is not a folder."""
    return _json(Path(name) / CONFIG)


def _json(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
