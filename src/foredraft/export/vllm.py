"""vLLM: `vllm serve` with --speculative-config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import Any

from foredraft.errors import ForedraftError
from foredraft.export.choice import Choice
from foredraft.export.differences import FIXED, GREEDY_DRAFTS, PER_SERVER
from foredraft.export.engine import NOT_EXPORTED, Engine, Translate, Translation, num_tokens
from foredraft.export.heads import (
    EAGLE_KINDS,
    HeadForm,
    check_speculators,
    checkpoint_of,
    eagle_kind,
    save_medusa_head,
    save_speculators,
)
from foredraft.export.render import as_command
from foredraft.model.checkpoint import raw_config
from foredraft.utils.arguments import rounds

TITLE, VERSION = "vLLM", "0.32"
PROPOSER = "foredraft.integrations.vllm.Proposer"
LOOKUPS = ("suffix", "ngram")
HEADS: Mapping[str, HeadForm] = MappingProxyType(
    {
        "eagle": HeadForm(
            ("speculators", "SafeAILab EAGLE-3", "SafeAILab EAGLE-1 and 2", "vLLM's EAGLE"),
            save_speculators,
            check_speculators,
        ),
        "medusa": HeadForm(("vLLM's Medusa",), save_medusa_head),
    }
)

REFUSED = (
    "vLLM refuses requests with min_p or logit_bias while it speculates, and your own logits processors at startup."
)
SYNCHRONOUS = (
    "vLLM switches asynchronous scheduling off for this method, for all requests, even where nothing is drafted."
)
ROUNDS = "Block verification is specific to foredraft: vLLM verifies tokens one by one."
PLUG_IN = (
    "Drafts come from foredraft as point masses, so at a temperature above 0 a draft token is accepted with the target's "
    "probability of it. foredraft must be installed where vLLM's workers run."
)
AUTO = (
    'With more than one tensor-parallel rank, "auto" drafts the full number of tokens with the first method in each step: ranks '
    "must not decide by their clocks."
)
ON_CPU = "The draft model runs on the CPU of vLLM's worker, with foredraft's kernels, because the plug-in combines it with lookups."
LAYERS = "vLLM supports the MTP layers of the families that it lists, and refuses others at startup."
NATIVE_NGRAM = (
    "vLLM's n-gram lookup chooses its own occurrence of the longest match, and does not continue past the end of the text, "
    "unlike foredraft's."
)
FORCED = (
    "Tokens that a grammar forces are not drafted for free there: drafts are only cut where the grammar forbids them."
)
_SERVED = (PER_SERVER, REFUSED, FORCED)


def draft_model(choice: Choice) -> Translation:
    """Raises ForedraftError for vocabularies of different sizes, which vLLM refuses, and for "auto"."""
    if choice.is_auto:
        raise ForedraftError(
            f"{TITLE} drafts a fixed number of tokens with a draft model and cannot use auto: the nearest alternatives are a number "
            "that foredraft tune finds, such as --speculative-tokens 4, and the plug-in, with --method suffix+draft_model"
        )
    sizes = choice.vocab_sizes
    if sizes is not None and sizes[0] != sizes[1]:
        raise ForedraftError(
            f"{TITLE} {VERSION} cannot use {choice.draft}: its vocabulary has {sizes[1]} ids and the target's "
            f"{sizes[0]}, but vLLM requires equal sizes; the nearest alternative is --method suffix"
        )
    return _native("draft_model", choice, model=choice.draft_model, draft_sample_method="probabilistic")


def eagle(choice: Choice) -> Translation:
    kind = EAGLE_KINDS[eagle_kind(choice)]
    return _native(kind, choice, model=choice.draft_model, draft_sample_method="probabilistic")


def medusa(choice: Choice) -> Translation:
    """Raises ForedraftError for more tokens than there are heads: each drafts one."""
    native = _native("medusa", choice, model=choice.draft_model)
    config: Any = checkpoint_of(choice).config
    if num_tokens(choice, TITLE) > config.num_heads:
        raise ForedraftError(
            f"{TITLE} {VERSION} cannot draft {choice.speculative_tokens} tokens with {config.num_heads} Medusa heads: give "
            f"--speculative-tokens {config.num_heads}"
        )
    return native._replace(differences=(GREEDY_DRAFTS, *native.differences))


def mtp(choice: Choice) -> Translation:
    """vLLM, too, loads the MTP layers from the target's own checkpoint."""
    native = _native("mtp", choice)
    return native._replace(differences=(GREEDY_DRAFTS, LAYERS, *native.differences))


def ngram(choice: Choice) -> Translation:
    """vLLM's own lookup for a fixed number of tokens; the plug-in for "auto"."""
    if choice.is_auto:
        return plug_in(choice)
    native = _native("ngram", choice, prompt_lookup_max=3, prompt_lookup_min=1)
    return native._replace(differences=(NATIVE_NGRAM, SYNCHRONOUS, *native.differences))


def plug_in(choice: Choice) -> Translation:
    """foredraft's drafters inside vLLM."""
    options: dict[str, Any] = {"method": list(choice.methods), "speculative_tokens": choice.speculative_tokens}
    on_cpu = "draft_model" in choice.methods
    if on_cpu:
        options["draft_model"] = choice.draft_model
        options |= _rounding(choice, choice.draft_model)
    tokens = choice.speculative_tokens if isinstance(choice.speculative_tokens, int) else choice.most_tokens
    fields = {
        "speculative_config": {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": tokens},
        "additional_config": {"foredraft": options},
    }
    more = [AUTO] if choice.is_auto else [FIXED]
    differences = (PLUG_IN, *more, *([ON_CPU] if on_cpu else []), SYNCHRONOUS, ROUNDS, *_SERVED)
    return Translation(fields, differences, rounds_drafts=on_cpu)


def _rounding(choice: Choice, draft: str) -> dict[str, str]:
    """How the plug-in rounds the draft model while loading: as LLM does, so a quantized checkpoint is not rounded like the target."""
    inherited = None if "quantization_config" in raw_config(draft) else choice.quantization
    rounding = choice.draft_quantization or inherited
    return {"draft_quantization": rounding} if rounds(rounding) else {}


def _native(method: str, choice: Choice, **options: Any) -> Translation:
    tokens = num_tokens(choice, TITLE)
    return Translation(
        {"speculative_config": {"method": method, **options, "num_speculative_tokens": tokens}},
        (FIXED, ROUNDS, *_SERVED),
    )


def _several(methods: Sequence[str]) -> dict[frozenset[str], Translate]:
    sizes = range(2, len(methods) + 1)
    return {frozenset(some): plug_in for size in sizes for some in combinations(methods, size)}


def render(choice: Choice, fields: Mapping[str, Any]) -> str:
    return as_command(("vllm", "serve", choice.target), fields)


METHODS: Mapping[str, Translate] = MappingProxyType(
    {"draft_model": draft_model, "eagle": eagle, "medusa": medusa, "mtp": mtp, "ngram": ngram, "suffix": plug_in}
)
_COPY = (
    "it does not make a quantized copy of the target by itself; the nearest alternative is a quantized checkpoint of it as --draft-model, with --method "
    "draft_model"
)
WHY_NOT: Mapping[str, str] = MappingProxyType(
    {
        **NOT_EXPORTED,
        "self-int8": _COPY,
        "self-int4": _COPY,
        "early_exit": "it cannot draft with layers of the target; the nearest alternative is an EAGLE head (--method eagle)",
    }
)
COMBINATIONS: Mapping[frozenset[str], Translate] = MappingProxyType(_several((*LOOKUPS, "draft_model")))

ENGINE = Engine("vllm", TITLE, VERSION, METHODS, WHY_NOT, render, COMBINATIONS, HEADS)
