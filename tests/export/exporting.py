"""Exports of the embedded pair and of random heads, and helpers to read them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from foredraft.export import ENGINES, Choice, Export, choice_of
from foredraft.model import EMBEDDED
from foredraft.settings import Settings
from tests.heads.random_heads import embedded_head

TARGET, DRAFT = str(EMBEDDED / "target"), str(EMBEDDED / "draft")
HEADS = ("eagle", "medusa", "early_exit")


def settings_of(method: str, tokens: int | str = 4, gguf: Path | None = None) -> Settings:
    """Settings with the models that the method needs. gguf: a folder of GGUF files to use instead."""
    names = method.split("+")
    drafts = [str(embedded_head(name)) for name in names if name in HEADS]
    drafts += [DRAFT] if "draft_model" in names else []
    target, draft = TARGET, next(iter(drafts), None)
    if gguf is not None:
        target, draft = str(gguf / "target.gguf"), str(gguf / "draft.gguf") if "draft_model" in names else draft
    return Settings(model=target, draft_model=draft, method=method, speculative_tokens=tokens)


def gguf_files(folder: Path) -> Path:
    for name in ("target", "draft"):
        (folder / f"{name}.gguf").write_bytes(b"GGUF")
    return folder


def choice(method: str, tokens: int | str = 4, gguf: Path | None = None) -> Choice:
    return choice_of(settings_of(method, tokens, gguf))


def export(engine: str, method: str, folder: Path, tokens: int | str = 4) -> Export:
    """Export settings. folder: an empty folder, to which a head is written in the engine's form."""
    exporter = ENGINES[engine]
    chosen = choice(method, tokens, gguf_files(folder) if exporter.reads_gguf else None)
    has_head = any(name in exporter.heads for name in chosen.methods)
    return exporter.export(chosen, folder / "head" if has_head else None)


def words_of(text: str) -> list[str]:
    """The words of the shell command in a text."""
    return shlex.split(text.replace("\\\n", " "), comments=True)


def options_of(text: str) -> dict[str, Any]:
    """The options of a command, by name with underscores. JSON values are parsed; an option without a value is True."""
    words = words_of(text)
    first = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    options: dict[str, Any] = {}
    for word in words[first:]:
        if word.startswith("--"):
            name = word.removeprefix("--").replace("-", "_")
            options[name] = True
        else:
            options[name] = _value(word)
    return options


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word
