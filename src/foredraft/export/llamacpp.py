"""llama.cpp: `llama-server`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from foredraft.export.choice import Choice
from foredraft.export.differences import CONVERTED, FIXED, GREEDY_DRAFTS, PER_SERVER
from foredraft.export.engine import NO_COPY, WITHOUT_HEADS, Engine, Translate, Translation, num_tokens
from foredraft.export.render import as_command

TITLE, VERSION = "llama.cpp", "b11549"

LOGPROBS = "Log-probabilities of drafted tokens were 0.0 in llama.cpp while it speculated (issue 27972)."
ONE_SIZE = "llama.cpp looks up the last three tokens, never fewer."
ITS_ORDER = "llama.cpp tries the methods in its own order; foredraft chooses the one that pays."
_SERVED = (FIXED, PER_SERVER, LOGPROBS, CONVERTED)


def draft_model(choice: Choice) -> Translation:
    return Translation({"spec_type": "draft-simple", **_draft(choice)}, (GREEDY_DRAFTS, *_SERVED))


def ngram(choice: Choice) -> Translation:
    return Translation({"spec_type": "ngram-simple", **_lookup(choice)}, (ONE_SIZE, *_SERVED))


def ngram_and_draft_model(choice: Choice) -> Translation:
    fields = {"spec_type": "ngram-simple,draft-simple", **_lookup(choice), **_draft(choice)}
    return Translation(fields, (ITS_ORDER, ONE_SIZE, GREEDY_DRAFTS, *_SERVED))


def _draft(choice: Choice) -> dict[str, Any]:
    return {"model_draft": choice.draft_model, "spec_draft_n_max": num_tokens(choice, TITLE)}


def _lookup(choice: Choice) -> dict[str, Any]:
    return {"spec_ngram_simple_size_n": 3, "spec_ngram_simple_size_m": num_tokens(choice, TITLE)}


def render(choice: Choice, fields: Mapping[str, Any]) -> str:
    return as_command(("llama-server",), {"model": choice.target, **fields})


METHODS: Mapping[str, Translate] = MappingProxyType({"draft_model": draft_model, "ngram": ngram})
_HEAD = "it loads heads as GGUF files, which its own converter writes; the nearest alternative is --method draft_model"
_COPY = f"{NO_COPY} a smaller GGUF file of it as --draft-model, with --method draft_model"
WHY_NOT: Mapping[str, str] = MappingProxyType(
    {
        **WITHOUT_HEADS,
        "eagle": _HEAD,
        "self-int8": _COPY,
        "self-int4": _COPY,
    }
)
COMBINATIONS: Mapping[frozenset[str], Translate] = MappingProxyType(
    {frozenset(("ngram", "draft_model")): ngram_and_draft_model}
)

ENGINE = Engine(
    "llamacpp",
    TITLE,
    VERSION,
    METHODS,
    WHY_NOT,
    render,
    COMBINATIONS,
    plain=Translation({"spec_type": "none"}, (CONVERTED,)),
    reads_gguf=True,
)
