"""Folders that are refused before anything is loaded, and the reasons."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from foredraft import LLM
from foredraft.errors import ModelError
from foredraft.model.checkpoint import EMBEDDED, raw_config, refuse_unusable


def gguf_file(folder: Path, name: str = "model-q4.gguf", data: bytes = b"GGUF\x03\0\0\0") -> Path:
    file = folder / name
    file.write_bytes(data)
    return file


def gguf_directory(folder: Path) -> Path:
    (folder / "model.gguf").mkdir()
    return folder / "model.gguf"


def gguf_folder(folder: Path) -> Path:
    return gguf_file(folder).parent


def gguf_beside_a_config(folder: Path) -> Path:
    shutil.copy(EMBEDDED / "target" / "config.json", folder)
    return gguf_folder(folder)


def adapter(folder: Path) -> Path:
    settings = {"peft_type": "LORA", "base_model_name_or_path": "someone/base"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def adapter_with_a_tokenizer(folder: Path) -> Path:
    shutil.copy(EMBEDDED / "target" / "tokenizer.json", folder)
    return adapter(folder)


def weights_file(folder: Path) -> Path:
    return Path(shutil.copy(EMBEDDED / "target" / "model.safetensors", folder))


def no_weights(folder: Path) -> Path:
    copy = shutil.copytree(EMBEDDED / "target", folder / "copy")
    (copy / "model.safetensors").unlink()
    return copy


def config_of(text: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        copy = shutil.copytree(EMBEDDED / "target", folder / "copy")
        (copy / "config.json").write_text(text)
        return copy

    return make


UNUSABLE: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "nothing": (lambda folder: folder / "nowhere", ("no such directory",)),
    "no hub id either": (lambda folder: Path("a/b/c/d"), ("no such directory", "hub id")),
    "an empty folder": (lambda folder: folder, ("no config.json",)),
    "a GGUF file that is cut": (gguf_file, ("GGUF", "download it again")),
    "an empty GGUF file": (lambda folder: gguf_file(folder, data=b""), ("empty", "download it again")),
    "a GGUF file with other bytes": (lambda folder: gguf_file(folder, data=b"<html>"), ("does not begin with GGUF",)),
    "a part of a GGUF file": (lambda folder: gguf_file(folder, "m-00002-of-00003.gguf"), ("part 2 of 3", "--merge")),
    "a GGUF file that is not there": (lambda folder: folder / "model.gguf", ("no such file",)),
    "a directory called a GGUF file": (gguf_directory, ("no config.json",)),
    "a GGUF file by another name": (lambda folder: gguf_file(folder, "blob"), ("GGUF", "download it again")),
    "a GGUF folder": (gguf_folder, ("GGUF", "one of them")),
    "a GGUF folder with a config": (gguf_beside_a_config, ("GGUF",)),
    "an adapter": (adapter, ("LoRA", "someone/base", "merge_and_unload")),
    "an adapter with a tokenizer": (adapter_with_a_tokenizer, ("LoRA", "merge_and_unload")),
    "a file of weights": (weights_file, ("a file", "directory")),
    "no weights": (no_weights, ("no weights",)),
    "a config that is cut": (config_of('{"model_type": '), ("config.json is not valid JSON",)),
    "a config that is a list": (config_of("[]"), ("config.json is not a JSON object",)),
}


@pytest.mark.parametrize(("make", "words"), UNUSABLE.values(), ids=UNUSABLE.keys())
@pytest.mark.parametrize("role", ["model", "draft_model"])
def test_unusable_folders_are_refused_with_the_reason(
    make: Callable[[Path], Path], words: tuple[str, ...], role: str, tmp_path: Path
) -> None:
    path = make(tmp_path)
    with pytest.raises(ModelError) as caught:
        LLM(**{role: path})
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    for word in words:
        assert word in message


def test_without_weights_a_model_is_usable_if_they_are_not_needed(tmp_path: Path) -> None:
    refuse_unusable(str(no_weights(tmp_path)), has_weights=False)


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B", str(EMBEDDED / "target"), str(EMBEDDED / "draft")])
def test_hub_ids_and_checkpoints_are_accepted(name: str) -> None:
    refuse_unusable(name)


def test_a_hub_id_has_no_local_configuration() -> None:
    assert raw_config("Qwen/Qwen3-0.6B") == {}
    assert raw_config(str(EMBEDDED / "target"))["hidden_size"] == 256
