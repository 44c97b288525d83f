"""TensorRT-LLM: YAML for `trtllm-serve TARGET --config FILE`, its PyTorch backend."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from foredraft.errors import ForedraftError
from foredraft.export.choice import Choice
from foredraft.export.differences import FIXED, PER_SERVER
from foredraft.export.engine import NO_COPY, NO_MTP, NOT_EXPORTED, Engine, Translate, Translation, num_tokens
from foredraft.export.heads import HeadForm, check_safeailab, checkpoint_of, eagle_kind, save_safeailab
from foredraft.export.render import as_yaml

TITLE, VERSION = "TensorRT-LLM", "1.4"

MIN_P = "TensorRT-LLM refuses requests with min_p."
REJECTION = (
    "Rejection sampling (use_rejection_sampling) is a prototype there; without it, drafts are compared with a sample."
)
EXACT_MATCH = "A draft token is accepted only if it equals a sample of the target, so fewer are accepted than here above temperature 0."
OWN_AUTOMATON = "TensorRT-LLM's suffix automaton does not track hit rates: it drafts all tokens after every match."
NGRAM = "TensorRT-LLM's n-gram pool does not continue past the end of the text, unlike foredraft's lookup."
SYNCHRONOUS = "The overlap scheduler is off for this method, for all requests, even where nothing is drafted."
LAYERS = "The layers that the head reads (eagle3_layers_to_capture) are those that foredraft determines from its files."
OVERRIDES = "The automaton replaces the head's drafts after matches of four tokens or more; foredraft chooses the one that pays."
_SERVED = (PER_SERVER, MIN_P)
_SAMPLING = {"allow_advanced_sampling": True, "use_rejection_sampling": True}
"""Before 1.4, sampled requests were decoded greedily without the first option; since then it has no effect."""


def draft_model(choice: Choice) -> Translation:
    config = {"decoding_type": "Draft_Target", "speculative_model": choice.draft_model, **_SAMPLING}
    return _translation(choice, config, (REJECTION, SYNCHRONOUS), disable_overlap_scheduler=True)


def eagle(choice: Choice) -> Translation:
    return _translation(choice, {**_eagle3(choice), **_SAMPLING}, (REJECTION, LAYERS))


def eagle_and_suffix(choice: Choice) -> Translation:
    """TensorRT-LLM itself switches rejection sampling off when it uses the automaton."""
    config = {**_eagle3(choice), "allow_advanced_sampling": True, "sa_config": {"threshold": 4}}
    return _translation(choice, config, (EXACT_MATCH, OVERRIDES, LAYERS))


def ngram(choice: Choice) -> Translation:
    """As in foredraft, the latest occurrence is taken, within the same text only."""
    config = {
        "decoding_type": "NGram",
        "max_matching_ngram_size": 3,
        "is_keep_all": True,
        "is_use_oldest": False,
        "is_public_pool": False,
    }
    return _translation(choice, config, (EXACT_MATCH, NGRAM, SYNCHRONOUS), disable_overlap_scheduler=True)


def suffix(choice: Choice) -> Translation:
    return _translation(choice, {"decoding_type": "SA", "enable_global_pool": False}, (EXACT_MATCH, OWN_AUTOMATON))


def _eagle3(choice: Choice) -> dict[str, Any]:
    """TensorRT-LLM numbers the layers to capture by their outputs. Raises ForedraftError for EAGLE-1 heads, and for heads that read the
    embeddings or the hidden state after the final norm."""
    if eagle_kind(choice) != "eagle3":
        raise ForedraftError(
            f"{TITLE} {VERSION} cannot use {choice.draft}, an EAGLE-1 head: its PyTorch backend supports only EAGLE-3; the "
            "nearest alternative is --method draft_model"
        )
    taps = checkpoint_of(choice).config.taps
    if min(taps) < 1:
        raise ForedraftError(
            f"{TITLE} {VERSION} cannot use {choice.draft}: it reads the hidden states {list(taps)}, but TensorRT-LLM provides "
            "only outputs of layers; train a head on others: foredraft train head --taps"
        )
    return {
        "decoding_type": "Eagle3",
        "speculative_model": choice.draft_model,
        "eagle3_layers_to_capture": [tap - 1 for tap in taps],
    }


def _translation(choice: Choice, config: Mapping[str, Any], more: tuple[str, ...], **fields: Any) -> Translation:
    speculative = {**config, "max_draft_len": num_tokens(choice, TITLE)}
    return Translation({**fields, "speculative_config": speculative}, (*more, FIXED, *_SERVED))


def render(choice: Choice, fields: Mapping[str, Any]) -> str:
    command = f"# trtllm-serve {choice.target} --config FILE, with this as FILE\n"
    return command + (as_yaml(fields) if fields else "{}\n")


METHODS: Mapping[str, Translate] = MappingProxyType(
    {"draft_model": draft_model, "eagle": eagle, "ngram": ngram, "suffix": suffix}
)
_COPY = f"{NO_COPY} a quantized checkpoint of it, with --method draft_model"
WHY_NOT: Mapping[str, str] = MappingProxyType(
    {
        **NOT_EXPORTED,
        "mtp": f"{NO_MTP} --method ngram",
        "medusa": "its PyTorch backend does not support Medusa; the nearest alternative is an EAGLE-3 head (--method eagle)",
        "early_exit": "it cannot draft with layers of the target; the nearest alternative is an EAGLE-3 head (--method eagle)",
        "self-int8": _COPY,
        "self-int4": _COPY,
    }
)
HEADS: Mapping[str, HeadForm] = MappingProxyType(
    {"eagle": HeadForm(("SafeAILab EAGLE-3",), save_safeailab, check_safeailab)}
)
COMBINATIONS: Mapping[frozenset[str], Translate] = MappingProxyType({frozenset(("suffix", "eagle")): eagle_and_suffix})

ENGINE = Engine("tensorrt-llm", TITLE, VERSION, METHODS, WHY_NOT, render, COMBINATIONS, HEADS)
