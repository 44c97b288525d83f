"""Converts conversations to token ids with the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from foredraft.errors import ForedraftError
from foredraft.text.tokenizing import encode_prompt, single_line

_PLACEHOLDER = "foredraft-user-message"


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    **template_args: Any,
) -> list[int]:
    """The token ids of a conversation, rendered with the tokenizer's chat template or the given one (Jinja).

    add_generation_prompt: end with the beginning of the assistant's next message; None: unless continue_final_message.
    continue_final_message: end inside the last message, for the model to continue it.
    template_args: further variables of the template (tools, documents, the template's own switches).

    The only special tokens are those that the template writes. Raises ForedraftError for malformed messages and for a template
    that fails.
    """
    _check_messages(messages)
    if continue_final_message:
        _check_continuation(messages, add_generation_prompt)
    if chat_template is None and not tokenizer.chat_template:
        raise ForedraftError(
            "this tokenizer has no chat template: pass chat_template= (a Jinja string) or generate from a text prompt"
        )
    text = _render(
        tokenizer,
        messages,
        chat_template=chat_template,
        add_generation_prompt=not continue_final_message if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=continue_final_message,
        **template_args,
    )
    return encode_prompt(tokenizer, text, add_special_tokens=False)


def user_turn_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The ids that the chat template writes before a user's first message, and those after it, up to the assistant's answer.
    Raises ForedraftError for a template that fails, or that does not write the message exactly once, between other text."""
    if not tokenizer.chat_template:
        raise ForedraftError("this tokenizer has no chat template, so its model cannot hold a conversation")
    text = _render(tokenizer, [{"role": "user", "content": _PLACEHOLDER}], add_generation_prompt=True)
    parts = text.split(_PLACEHOLDER)
    if len(parts) != 2 or not all(parts):
        raise ForedraftError(
            "the chat template does not write a user's message exactly once between other text, so no conversation can be "
            "written"
        )
    opening, closing = (encode_prompt(tokenizer, part, add_special_tokens=False) for part in parts)
    return opening, closing


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], **template_args: Any) -> str:
    try:
        return _apply(tokenizer, messages, template_args)
    except Exception as error:  # a template is a program
        text = _with_empty_contents(tokenizer, messages, template_args)
        if text is None:
            raise ForedraftError(f"the chat template fails on these messages: {single_line(error)}") from error
        return text


def _apply(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], template_args: Mapping[str, Any]
) -> str:
    text = tokenizer.apply_chat_template(
        cast("list[dict[str, str]]", [dict(message) for message in messages]), tokenize=False, **template_args
    )
    return cast(str, text)


def _with_empty_contents(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], template_args: Mapping[str, Any]
) -> str | None:
    """The text if the content of a message that only calls tools is "": templates without tools (ChatML's) concatenate it. None if the
    template fails then too, or knows tools but leaves the called functions out."""
    calls = [message for message in messages if message.get("content") is None]
    if not calls:
        return None
    filled = [{**message, "content": message.get("content") or ""} for message in messages]
    try:
        text = _apply(tokenizer, filled, template_args)
    except Exception:
        return None
    template = template_args.get("chat_template") or tokenizer.chat_template
    is_shown = "tool_calls" not in str(template) or all(name in text for call in calls for name in _called(call))
    return text if is_shown else None


def _called(message: Mapping[str, Any]) -> list[str]:
    """The names of the functions that a message calls."""
    functions = (call.get("function", call) for call in message.get("tool_calls") or () if isinstance(call, Mapping))
    return [str(each["name"]) for each in functions if isinstance(each, Mapping) and "name" in each]


def _check_continuation(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool | None) -> None:
    if add_generation_prompt:
        raise ForedraftError("continue_final_message and add_generation_prompt are mutually exclusive: leave one out")
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str) or not last["content"].strip():
        raise ForedraftError(
            "continue_final_message needs the last message to be the assistant's, with text as its content"
        )


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ForedraftError("messages must be a non-empty list of dicts with 'role' and 'content'")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ForedraftError(f"message {i} must be a dict with a 'role' and a 'content'")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ForedraftError(f"the content of message {i} must be a string, not {type(content).__name__}")
