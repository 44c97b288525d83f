"""transformers: Python for `generate`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from foredraft.errors import ForedraftError
from foredraft.export.choice import Choice
from foredraft.export.differences import FIXED
from foredraft.export.engine import NO_COPY, NOT_EXPORTED, Engine, Translate, Translation, num_tokens
from foredraft.export.render import Code, as_call

TITLE, VERSION = "transformers", "5.23"

ONE_TEXT = "transformers speculates for one text at a time: a batch of several is refused."
LOOKUP = "transformers' lookup takes the first occurrence of the longest match, and does not continue past the end of the text."
PLAIN_EXIT = "The exit has no layers of its own: the target's final norm and lm_head follow the layer directly."
ONE_A_LAYER = (
    "transformers drafts one token for each MTP layer of the checkpoint, whatever the number of draft tokens here."
)
HERE = 'foredraft.generate takes the same model object, with batches, all drafters and "auto".'
_SERVED = (FIXED, ONE_TEXT, HERE)


def draft_model(choice: Choice) -> Translation:
    lines = (f"draft = {_load(choice.draft_model)}", *_chain("draft", num_tokens(choice, TITLE)))
    return Translation({"lines": lines, "options": {"assistant_model": Code("draft")}}, _SERVED)


def ngram(choice: Choice) -> Translation:
    options = {"prompt_lookup_num_tokens": num_tokens(choice, TITLE), "max_matching_ngram_size": 3}
    return Translation({"options": options}, (LOOKUP, *_SERVED))


def mtp(_: Choice) -> Translation:
    return Translation({"options": {"use_mtp": True}}, (ONE_A_LAYER, *_SERVED))


def early_exit(choice: Choice) -> Translation:
    """Raises ForedraftError for a trained exit, whose layers transformers does not load."""
    if choice.exit_layer is None:
        raise ForedraftError(
            f"{TITLE} {VERSION} cannot use {choice.draft}: it does not load trained exits; the nearest alternative is an "
            "untrained exit: --exit-layer without --draft-model"
        )
    lines = _chain("target", num_tokens(choice, TITLE))
    return Translation({"lines": lines, "options": {"assistant_early_exit": choice.exit_layer}}, (PLAIN_EXIT, *_SERVED))


def _chain(model: str, tokens: int) -> tuple[str, ...]:
    """The number of draft tokens is set in the generation configuration of the model that drafts."""
    values = {
        "num_assistant_tokens": tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    return tuple(f"{model}.generation_config.{name} = {value!r}" for name, value in values.items())


def _load(name: str) -> str:
    return f"AutoModelForCausalLM.from_pretrained({name!r})"


def render(choice: Choice, fields: Mapping[str, Any]) -> str:
    """Code that loads the models, and the options for the target's `generate`."""
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({choice.target!r})",
        f"target = {_load(choice.target)}",
        *fields.get("lines", ()),
        f"options = {as_call('dict', **fields.get('options', {}))}",
        '# target.generate(**tokenizer(prompt, return_tensors="pt"), **options)',
    ]
    return "\n".join(lines) + "\n"


METHODS: Mapping[str, Translate] = MappingProxyType(
    {"draft_model": draft_model, "ngram": ngram, "early_exit": early_exit, "mtp": mtp}
)
_COPY = f"{NO_COPY} a quantized checkpoint of it, with --method draft_model"
WHY_NOT: Mapping[str, str] = MappingProxyType(
    {
        **NOT_EXPORTED,
        "suffix": "it does not support suffix decoding; the nearest alternative is --method ngram",
        "eagle": "it does not load EAGLE heads; the nearest alternative is --method draft_model",
        "medusa": "it does not load Medusa heads; the nearest alternative is --method draft_model",
        "self-int8": _COPY,
        "self-int4": _COPY,
    }
)

ENGINE = Engine("transformers", TITLE, VERSION, METHODS, WHY_NOT, render)
