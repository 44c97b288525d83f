"""Golden files as checkpoints that tests can load and damage."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from foredraft.heads import TargetShape

FOLDER = Path(__file__).parent / "golden"
TARGET = TargetShape(num_layers=8, hidden_size=16, vocab_size=32)


@dataclass(frozen=True)
class Golden:
    """A golden file. config, tensors: the checkpoint. inputs, expected: see make_golden.py."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    inputs: dict[str, Tensor] = field(default_factory=dict)
    expected: dict[str, Tensor] = field(default_factory=dict)

    def save(self, folder: Path, file: str = "model.safetensors") -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        tensors = {name: tensor.contiguous().clone() for name, tensor in self.tensors.items()}
        if file.endswith(".safetensors"):
            save_file(tensors, folder / file)
        else:
            torch.save(tensors, folder / file)
        return folder

    def having(self, config: Mapping[str, Any] | None = None, tensors: Mapping[str, Tensor] | None = None) -> Golden:
        """A copy with these keys and tensors changed or added; None removes a key."""
        merged = {**self.config, **(config or {})}
        kept = {key: value for key, value in merged.items() if value is not None}
        return Golden(kept, {**self.tensors, **(tensors or {})}, self.inputs, self.expected)

    def without(self, names: Iterable[str]) -> Golden:
        names = set(names)
        assert names <= self.tensors.keys()
        kept = {name: tensor for name, tensor in self.tensors.items() if name not in names}
        return Golden(self.config, kept, self.inputs, self.expected)

    def renamed(self, **prefixes: str) -> Golden:
        """A copy with prefixes of tensors' names replaced, each by the last rule that matches."""
        tensors = {}
        for name, tensor in self.tensors.items():
            new = name
            for old, prefix in prefixes.items():
                if name.startswith(old):
                    new = prefix + name.removeprefix(old)
            tensors[new] = tensor
        return Golden(self.config, tensors, self.inputs, self.expected)


@cache
def golden(name: str) -> Golden:
    parts: dict[str, dict[str, Tensor]] = {"checkpoint": {}, "inputs": {}, "expected": {}}
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        config = json.loads(file.metadata()["config"])
        for key in file.keys():  # noqa: SIM118 (no mapping)
            part, name = key.split("/", 1)
            parts[part][name] = file.get_tensor(key)
    return Golden(config, *parts.values())
