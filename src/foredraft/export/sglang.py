"""SGLang: `python -m sglang.launch_server` with --speculative-* options."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from foredraft.export.choice import Choice
from foredraft.export.differences import FIXED, GREEDY_DRAFTS, PER_SERVER
from foredraft.export.engine import NO_COPY, NO_MTP, NOT_EXPORTED, Engine, Translate, Translation, num_tokens
from foredraft.export.heads import EAGLE_KINDS, HeadForm, check_safeailab, eagle_kind, save_safeailab
from foredraft.export.render import as_command

TITLE, VERSION = "SGLang", "0.5.23"

PROCESSORS = "SGLang does not apply your own logits processors to drafted tokens."
SHARED = (
    "SGLang keeps one trie of the texts of all requests and drafts from it: the speed of one user's requests can reveal "
    "another's tokens. foredraft's lookups stay within a text."
)
WINDOW = "SGLang matches the longest suffix in its trie, not the last three tokens."
NO_OVERLAP = "SGLang switches mixed chunked prefill off for this method, and on a CPU the overlap scheduler too."
ADAPTIVE = "SGLang adapts the number of draft tokens to what was accepted, not to time, and always drafts some."
_SERVED = (PER_SERVER, PROCESSORS)


def draft_model(choice: Choice) -> Translation:
    """SGLang refuses rejection sampling for STANDALONE, so drafts are greedy."""
    fields = {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": choice.draft_model,
        **_chain(num_tokens(choice, TITLE)),
    }
    return Translation(fields, (GREEDY_DRAFTS, FIXED, *_SERVED))


def eagle(choice: Choice) -> Translation:
    fields: dict[str, Any] = {
        "speculative_algorithm": EAGLE_KINDS[eagle_kind(choice)].upper(),
        "speculative_draft_model_path": choice.draft_model,
        "speculative_use_rejection_sampling": True,
    }
    if choice.is_auto:
        return Translation({**fields, "speculative_eagle_topk": 1, "speculative_adaptive": True}, (ADAPTIVE, *_SERVED))
    return Translation({**fields, **_chain(num_tokens(choice, TITLE))}, (FIXED, *_SERVED))


def ngram(choice: Choice) -> Translation:
    """SGLang's number of draft tokens includes the pending token."""
    fields = {
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": num_tokens(choice, TITLE) + 1,
        "speculative_ngram_max_bfs_breadth": 1,
    }
    return Translation(fields, (SHARED, WINDOW, NO_OVERLAP, FIXED, *_SERVED))


def _chain(tokens: int) -> dict[str, int]:
    """A draft without branches. SGLang's number of draft tokens includes the pending token."""
    return {
        "speculative_num_steps": tokens,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": tokens + 1,
    }


def render(choice: Choice, fields: Mapping[str, Any]) -> str:
    program = ("python", "-m", "sglang.launch_server")
    return as_command(program, {"model_path": choice.target, **fields})


METHODS: Mapping[str, Translate] = MappingProxyType({"draft_model": draft_model, "eagle": eagle, "ngram": ngram})
_COPY = f"{NO_COPY} a quantized checkpoint of it, with --method draft_model"
WHY_NOT: Mapping[str, str] = MappingProxyType(
    {
        **NOT_EXPORTED,
        "mtp": f"{NO_MTP} --method ngram",
        "suffix": "it does not support suffix decoding within a text; the nearest alternative is its trie, --method ngram",
        "medusa": "it does not support Medusa; the nearest alternative is an EAGLE head (--method eagle)",
        "early_exit": "it cannot draft with layers of the target; the nearest alternative is an EAGLE head (--method eagle)",
        "self-int8": _COPY,
        "self-int4": _COPY,
    }
)
HEADS: Mapping[str, HeadForm] = MappingProxyType(
    {"eagle": HeadForm(("SafeAILab EAGLE-3", "SafeAILab EAGLE-1 and 2"), save_safeailab, check_safeailab)}
)

ENGINE = Engine("sglang", TITLE, VERSION, METHODS, WHY_NOT, render, heads=HEADS)
