"""Fields of other servers and clients that would change the text, or its privacy, and are not honoured: refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic_core import PydanticCustomError

from foredraft.server.wire.base import REFUSED


class _Refused(NamedTuple):
    """neutral: values that ask for nothing; None is always one."""

    reason: str
    neutral: tuple[Any, ...] = ()


_BEAMS = "beam search is not supported"
_TRUNCATION = "this way to truncate the distribution is not supported: use top_k, top_p or min_p"
_PENALTY = "this penalty is not supported: use repetition_penalty, frequency_penalty or presence_penalty"
_OTHER_NAME = "this is the name of another API: here it is "
_OTHER_ROUTE = "this belongs to another route"

_REFUSED: Mapping[str, _Refused] = {
    # vLLM's
    "use_beam_search": _Refused(_BEAMS, (False,)),
    "length_penalty": _Refused(_BEAMS, (1,)),
    "early_stopping": _Refused(_BEAMS, (False,)),
    "logits_processors": _Refused("code is not taken over the wire", ([],)),
    "vllm_xargs": _Refused("there are no plugins", ({},)),
    "truncate_prompt_tokens": _Refused("prompts are not cut: send what shall be read"),
    "prompt_embeds": _Refused("prompts are text or token ids"),
    "add_special_tokens": _Refused("a chat template writes its own; a prompt without them can be sent as token ids"),
    "documents": _Refused("send documents in a message, or in chat_template_kwargs", ([],)),
    "mm_processor_kwargs": _Refused("text only", ({},)),
    "structural_tag": _Refused("use structured_outputs.grammar"),
    "guided_whitespace_pattern": _Refused('say it in the schema, as "x-guidance": {"whitespace_pattern": ...}'),
    "spaces_between_special_tokens": _Refused("special tokens are shown as the tokenizer does", (True,)),
    "cache_salt": _Refused("prefixes are not kept apart by a salt: prefix_caching: false shares nothing"),
    "thinking_token_budget": _Refused("thinking is not counted"),
    "repetition_detection": _Refused("not supported"),
    # SGLang's and text-generation-inference's
    "ebnf": _Refused(f"{_OTHER_NAME}structured_outputs.grammar"),
    "regex": _Refused(f"{_OTHER_NAME}structured_outputs.regex"),
    "custom_logit_processor": _Refused("code is not taken over the wire"),
    "lora_path": _Refused("one model is served"),
    "max_new_tokens": _Refused(f"{_OTHER_NAME}max_tokens"),
    "no_stop_trim": _Refused(f"{_OTHER_NAME}include_stop_str_in_output", (False,)),
    "do_sample": _Refused("temperature says it: 0 is greedy"),
    "watermark": _Refused("not supported", (False,)),
    "num_beams": _Refused(_BEAMS, (1,)),
    # llama.cpp's
    "n_predict": _Refused(f"{_OTHER_NAME}max_tokens", (-1,)),
    "n_keep": _Refused("prompts are not cut", (0,)),
    "grammar": _Refused("GBNF is not read: use structured_outputs.grammar, in Lark's form", ("",)),
    "json_schema": _Refused(f"{_OTHER_NAME}response_format, or structured_outputs.json"),
    "repeat_penalty": _Refused(f"{_OTHER_NAME}repetition_penalty", (1,)),
    "repeat_last_n": _Refused("a penalty looks at the whole text"),
    "lora": _Refused("one model is served", ([],)),
    "samplers": _Refused("the order is penalties, temperature, min_p, top_k, top_p"),
    "typical_p": _Refused(_TRUNCATION, (1,)),
    "tfs_z": _Refused(_TRUNCATION, (1,)),
    "top_n_sigma": _Refused(_TRUNCATION, (-1,)),
    "xtc_probability": _Refused(_TRUNCATION, (0,)),
    "mirostat": _Refused(_TRUNCATION, (0,)),
    "dynatemp_range": _Refused("the temperature is one number", (0,)),
    "dry_multiplier": _Refused(_PENALTY, (0,)),
    "no_repeat_ngram_size": _Refused(_PENALTY, (0,)),
    # of the neighbouring routes
    "prompt": _Refused(_OTHER_ROUTE),
    "messages": _Refused(_OTHER_ROUTE),
    "input": _Refused(_OTHER_ROUTE),
    "echo": _Refused("only prompts can be echoed, by /v1/completions", (False,)),
    "suffix": _Refused("text is not written into gaps", ("",)),
    "best_of": _Refused("every text that is written is given back", (1,)),
    "max_completion_tokens": _Refused(_OTHER_ROUTE),
    "max_output_tokens": _Refused(_OTHER_ROUTE),
    "max_tokens": _Refused(_OTHER_ROUTE),
    "tools": _Refused(_OTHER_ROUTE, ([],)),
    "audio": _Refused("text only"),
    "modalities": _Refused("text only", (["text"],)),
}


def check_extra(given: Mapping[str, Any]) -> None:
    """given: fields that a request does not have. Raises PydanticCustomError for the first one that is refused."""
    for name, value in given.items():
        if name in _REFUSED and not _asks_for_nothing(name, value):
            message = "not supported: {reason}"
            raise PydanticCustomError(REFUSED, message, {"name": name, "reason": _REFUSED[name].reason})


def is_refused(name: str) -> bool:
    """Whether it is known, so that a value that asks for nothing is not worth a warning."""
    return name in _REFUSED


def describe_refused(schema: dict[str, Any]) -> None:
    """Add the fields that a request does not have to its JSON schema, each with the values that ask for nothing."""
    for name, (reason, neutral) in _REFUSED.items():
        schema["properties"].setdefault(name, {"enum": [None, *neutral], "description": f"not supported: {reason}"})


def _asks_for_nothing(name: str, value: Any) -> bool:
    """Numbers are compared as JSON does: 1 is 1.0, and is not true."""
    return value is None or any(
        isinstance(value, bool) == isinstance(one, bool) and value == one for one in _REFUSED[name].neutral
    )
