"""Fields of other servers that would affect the text or its privacy and are not supported. They are rejected by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic_core import PydanticCustomError

UNSUPPORTED_FIELD = "unsupported_field"
"""The type of the validation error for one of these fields; its context has the name."""


class _UnsupportedField(NamedTuple):
    """neutral: the values that ask for nothing, besides None."""

    reason: str
    neutral: tuple[Any, ...] = ()


_BEAMS = "beam search is not supported"
_TRUNCATION = "this truncation of the distribution is not supported: use top_k, top_p or min_p"
_PENALTY = "this penalty is not supported: use repetition_penalty, frequency_penalty or presence_penalty"
_OTHER_NAME = "this is the name in another API: use "
_OTHER_ROUTE = "this belongs to another route"

_UNSUPPORTED: Mapping[str, _UnsupportedField] = {
    # vLLM's
    "use_beam_search": _UnsupportedField(_BEAMS, (False,)),
    "length_penalty": _UnsupportedField(_BEAMS, (1,)),
    "early_stopping": _UnsupportedField(_BEAMS, (False,)),
    "logits_processors": _UnsupportedField("requests cannot contain code", ([],)),
    "vllm_xargs": _UnsupportedField("there are no plugins", ({},)),
    "truncate_prompt_tokens": _UnsupportedField("prompts are not truncated: send a shorter prompt"),
    "prompt_embeds": _UnsupportedField("prompts are text or token ids"),
    "add_special_tokens": _UnsupportedField("a chat template adds its own; send token ids for a prompt without them"),
    "documents": _UnsupportedField("send documents in a message, or in chat_template_kwargs", ([],)),
    "mm_processor_kwargs": _UnsupportedField("text only", ({},)),
    "structural_tag": _UnsupportedField("use structured_outputs.grammar"),
    "guided_whitespace_pattern": _UnsupportedField(
        'set it in the schema, with "x-guidance": {"whitespace_pattern": ...}'
    ),
    "spaces_between_special_tokens": _UnsupportedField(
        "special tokens are decoded as the tokenizer decodes them", (True,)
    ),
    "cache_salt": _UnsupportedField("the prefix cache has no salt: set prefix_caching to false to share nothing"),
    "thinking_token_budget": _UnsupportedField("thinking tokens are not counted"),
    "repetition_detection": _UnsupportedField("not supported"),
    # SGLang's and text-generation-inference's
    "ebnf": _UnsupportedField(f"{_OTHER_NAME}structured_outputs.grammar"),
    "regex": _UnsupportedField(f"{_OTHER_NAME}structured_outputs.regex"),
    "custom_logit_processor": _UnsupportedField("requests cannot contain code"),
    "lora_path": _UnsupportedField("only one model is served"),
    "max_new_tokens": _UnsupportedField(f"{_OTHER_NAME}max_tokens"),
    "no_stop_trim": _UnsupportedField(f"{_OTHER_NAME}include_stop_str_in_output", (False,)),
    "do_sample": _UnsupportedField("use temperature: 0 is greedy"),
    "watermark": _UnsupportedField("not supported", (False,)),
    "num_beams": _UnsupportedField(_BEAMS, (1,)),
    # llama.cpp's
    "n_predict": _UnsupportedField(f"{_OTHER_NAME}max_tokens", (-1,)),
    "n_keep": _UnsupportedField("prompts are not truncated", (0,)),
    "grammar": _UnsupportedField("GBNF is not supported: use structured_outputs.grammar, in Lark's syntax", ("",)),
    "json_schema": _UnsupportedField(f"{_OTHER_NAME}response_format, or structured_outputs.json"),
    "repeat_penalty": _UnsupportedField(f"{_OTHER_NAME}repetition_penalty", (1,)),
    "repeat_last_n": _UnsupportedField("penalties apply to the whole text"),
    "lora": _UnsupportedField("only one model is served", ([],)),
    "samplers": _UnsupportedField("the order is fixed: penalties, temperature, min_p, top_k, top_p"),
    "typical_p": _UnsupportedField(_TRUNCATION, (1,)),
    "tfs_z": _UnsupportedField(_TRUNCATION, (1,)),
    "top_n_sigma": _UnsupportedField(_TRUNCATION, (-1,)),
    "xtc_probability": _UnsupportedField(_TRUNCATION, (0,)),
    "mirostat": _UnsupportedField(_TRUNCATION, (0,)),
    "dynatemp_range": _UnsupportedField("the temperature is a single number", (0,)),
    "dry_multiplier": _UnsupportedField(_PENALTY, (0,)),
    "no_repeat_ngram_size": _UnsupportedField(_PENALTY, (0,)),
    # of our other routes
    "prompt": _UnsupportedField(_OTHER_ROUTE),
    "messages": _UnsupportedField(_OTHER_ROUTE),
    "input": _UnsupportedField(_OTHER_ROUTE),
    "echo": _UnsupportedField("only /v1/completions can echo a prompt", (False,)),
    "suffix": _UnsupportedField("infilling is not supported", ("",)),
    "best_of": _UnsupportedField("every generated text is returned", (1,)),
    "max_completion_tokens": _UnsupportedField(_OTHER_ROUTE),
    "max_output_tokens": _UnsupportedField(_OTHER_ROUTE),
    "max_tokens": _UnsupportedField(_OTHER_ROUTE),
    "tools": _UnsupportedField(_OTHER_ROUTE, ([],)),
    "audio": _UnsupportedField("text only"),
    "modalities": _UnsupportedField("text only", (["text"],)),
}


def check_unsupported(given: Mapping[str, Any]) -> None:
    """given: fields that the request's model lacks. Raises PydanticCustomError for the first one that asks for something unsupported."""
    for name, value in given.items():
        if name in _UNSUPPORTED and not _asks_for_nothing(name, value):
            message = "not supported: {reason}"
            raise PydanticCustomError(UNSUPPORTED_FIELD, message, {"name": name, "reason": _UNSUPPORTED[name].reason})


def is_unsupported(name: str) -> bool:
    """Whether the field is listed here."""
    return name in _UNSUPPORTED


def describe_unsupported(schema: dict[str, Any]) -> None:
    """Add the unsupported fields that a request's model lacks to its JSON schema, each with the values that ask for nothing."""
    for name, (reason, neutral) in _UNSUPPORTED.items():
        schema["properties"].setdefault(name, {"enum": [None, *neutral], "description": f"not supported: {reason}"})


def _asks_for_nothing(name: str, value: Any) -> bool:
    """Numbers are compared as in JSON: 1 equals 1.0, but not true."""
    return value is None or any(
        isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
        for neutral in _UNSUPPORTED[name].neutral
    )
