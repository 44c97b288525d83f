"""MAX: `max serve`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from foredraft.errors import ForedraftError
from foredraft.export.choice import Choice
from foredraft.export.differences import FIXED, PER_SERVER
from foredraft.export.engine import NO_MTP, NOT_EXPORTED, Engine, Translate, Translation
from foredraft.export.heads import HeadForm, check_safeailab, checkpoint_of, eagle_kind, save_safeailab
from foredraft.export.render import as_command
from foredraft.model.checkpoint import raw_config

TITLE, VERSION = "MAX", "26.7"

SAMPLED = (
    "MAX drafts greedily and compares drafts with a sample unless it is configured otherwise; if configured to sample, "
    "it stops at startup for an architecture that cannot."
)
PENALTIES = "MAX ignores presence, frequency and repetition penalties while it speculates, with a warning."
ADAPTIVE = (
    "MAX adapts how many draft tokens it verifies to the measured tokens per second, but always verifies some; it drafts all "
    "of them."
)
_SERVED = (SAMPLED, PENALTIES, PER_SERVER)


def eagle(choice: Choice) -> Translation:
    """Raises ForedraftError for a head that reads other layers than those whose inputs MAX passes to heads."""
    _check_taps(choice)
    adapts = isinstance(choice.speculative_tokens, str)
    fields = {
        "draft_model": choice.draft_model,
        "speculative_method": "eagle",
        "num_speculative_tokens": choice.most_tokens if adapts else choice.speculative_tokens,
        "draft_proposal": "sampled",
    }
    if adapts:
        return Translation({**fields, "adaptive_speculative_widths": "all"}, (ADAPTIVE, *_SERVED))
    return Translation(fields, (FIXED, *_SERVED))


def _check_taps(choice: Choice) -> None:
    if eagle_kind(choice) != "eagle3":
        return
    from foredraft.heads.formats.eagle3 import default_taps

    taps, num_layers = checkpoint_of(choice).config.taps, raw_config(choice.target).get("num_hidden_layers")
    if isinstance(num_layers, int) and taps != default_taps(num_layers):
        raise ForedraftError(
            f"{TITLE} {VERSION} cannot use {choice.draft}: it reads the inputs of the layers {list(taps)}, but MAX provides "
            f"those of {list(default_taps(num_layers))}; train a head on these: foredraft train head --taps"
        )


def render(choice: Choice, fields: Mapping[str, Any]) -> str:
    return as_command(("max", "serve"), {"model": choice.target, **fields})


METHODS: Mapping[str, Translate] = MappingProxyType({"eagle": eagle})
_NO_LOOKUP = "it does not support lookup; the nearest alternative is an EAGLE head (--method eagle)"
WHY_NOT: Mapping[str, str] = MappingProxyType(
    {
        **NOT_EXPORTED,
        "mtp": f"{NO_MTP} an EAGLE head (--method eagle)",
        "draft_model": "it does not support draft models; the nearest alternative is an EAGLE head (--method eagle)",
        "ngram": _NO_LOOKUP,
        "suffix": _NO_LOOKUP,
        "medusa": "it does not support Medusa; the nearest alternative is an EAGLE head (--method eagle)",
        "early_exit": "it cannot draft with layers of the target; the nearest alternative is an EAGLE head (--method eagle)",
        "self-int8": "it does not support draft models; the nearest alternative is an EAGLE head (--method eagle)",
        "self-int4": "it does not support draft models; the nearest alternative is an EAGLE head (--method eagle)",
    }
)
HEADS: Mapping[str, HeadForm] = MappingProxyType(
    {"eagle": HeadForm(("SafeAILab EAGLE-3", "SafeAILab EAGLE-1 and 2"), save_safeailab, check_safeailab)}
)

ENGINE = Engine("max", TITLE, VERSION, METHODS, WHY_NOT, render, heads=HEADS)
