"""Held-out documents as a target reads them: texts for a decoder-only model, pairs of source and text for an encoder-decoder."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from foredraft.engine.sources import NO_SOURCE, Source
from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.text.tokenizing import encode_prompt
from foredraft.train.corpus import Pair
from foredraft.train.pairs import tokenize_pairs

HeldOutDocument: TypeAlias = str | Pair


class HeldOutText(NamedTuple):
    """prompt: what the target continues or answers. source: what its encoder reads; NO_SOURCE if it has none. ids: of the whole text,
    of which the first num_given are not predicted."""

    prompt: list[int]
    source: Source
    ids: list[int]
    num_given: int


def held_out_text(llm: LLM, document: HeldOutDocument, prompt_len: int) -> HeldOutText | None:
    """The document, cut to what the models can read; None if it is too short. prompt_len: tokens of a text that are the prompt; the
    prompt of a pair is its source. Raises ForedraftError for a text if the target is an encoder-decoder, and for a pair otherwise."""
    _check_kind(llm, document)
    if isinstance(document, Pair):
        return _of_pair(llm, document)
    ids = encode_prompt(llm.text_tokenizer, document)[: llm.max_model_len]
    return HeldOutText(ids[:prompt_len], NO_SOURCE, ids, 1) if len(ids) > prompt_len else None


def beginning(document: HeldOutDocument, num_characters: int) -> str:
    """A prompt for the target: the beginning of a text, or the source of a pair."""
    return document.source if isinstance(document, Pair) else document.strip()[:num_characters].rstrip()


def _check_kind(llm: LLM, document: HeldOutDocument) -> None:
    target = llm.target
    if isinstance(document, Pair) == target.has_encoder:
        return
    kind, right = (
        ("an encoder-decoder", "--pairs (sources and texts)")
        if target.has_encoder
        else ("a decoder-only model", "--data (texts)")
    )
    raise ForedraftError(f"{target.traits.name} is {kind}: give {right}")


def _of_pair(llm: LLM, pair: Pair) -> HeldOutText | None:
    """A text of one token is too short: a draft that uses the target's encoder cannot draft the first token."""
    (pair_ids,) = tokenize_pairs([pair], llm.text_tokenizer)
    encoders = [model for model in (llm.target, llm.draft) if model is not None and model.has_encoder]
    prompt = pair_ids.source[: min(model.traits.source_len for model in encoders)]
    source, given = llm.target.inputs_for(prompt)
    ids = [*given, *pair_ids.text][: llm.max_model_len]
    return HeldOutText(prompt, source, ids, len(given)) if len(ids) > len(given) + 1 else None
