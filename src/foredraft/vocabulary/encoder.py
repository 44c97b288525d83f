"""Make a tokenizer that adds nothing to a text and changes nothing in it from another tokenizer."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer

from foredraft.vocabulary.surface import SPACE, Component, component_of


def encoder_of(backend: Any) -> Tokenizer:
    """A tokenizer with the same vocabulary and merges, in the same memory, but without special tokens, without a space before a text, and
    without normalizers that change a text, except to respell spaces. backend: a `tokenizers.Tokenizer`, which stays unchanged."""
    encoder = Tokenizer(backend.model)
    normalizer, splitter = _parts(
        _only_respelling(component_of(backend.normalizer)), _without_prefix(component_of(backend.pre_tokenizer))
    )
    encoder.normalizer, encoder.pre_tokenizer = normalizer, splitter
    added = [token for _, token in sorted(backend.get_added_tokens_decoder().items())]
    encoder.add_tokens([AddedToken(each.content, normalized=each.normalized, special=each.special) for each in added])
    encoder.encode_special_tokens = True  # special tokens in a text are encoded as text
    return encoder


def _parts(normalizer: Component, splitter: Component) -> tuple[Any, Any]:
    """Convert both to objects of the library."""
    empty: dict[str, Any] = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": []}
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    parts = {"normalizer": normalizer, "pre_tokenizer": splitter, "post_processor": None, "decoder": None}
    made = Tokenizer.from_str(json.dumps({**empty, **parts, "model": model}))
    return made.normalizer, made.pre_tokenizer


def _only_respelling(normalizer: Component) -> Component:
    if normalizer is None:
        return None
    if normalizer["type"] == "Sequence":
        kept = [part for part in map(_only_respelling, normalizer["normalizers"]) if part is not None]
        return {"type": "Sequence", "normalizers": kept} if kept else None
    respells = normalizer["type"] == "Replace" and normalizer["content"] == SPACE
    return normalizer if respells or normalizer["type"] == "ByteLevel" else None


def _without_prefix(splitter: Component) -> Component:
    if splitter is None:
        return None
    if splitter["type"] == "Sequence":
        return {**splitter, "pretokenizers": [_without_prefix(part) for part in splitter["pretokenizers"]]}
    if splitter["type"] == "ByteLevel":
        return {**splitter, "add_prefix_space": False}
    return {**splitter, "prepend_scheme": "never"} if splitter["type"] == "Metaspace" else splitter
