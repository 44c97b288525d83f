"""Conversations with a chat template, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foredraft.errors import ForedraftError
from foredraft.text.chat_template import render_chat
from tests.text.toy_tokenizers import build, decode, encode

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[ai]{% endif %}"
)


def test_a_chat_only_has_the_special_tokens_of_its_template(shared: Path) -> None:
    tokenizer = build("target")
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    assert render_chat(tokenizer, chat, chat_template=TEMPLATE) == [0, *encode(tokenizer, "[user]hi[assistant]yes[ai]")]
    assert (
        render_chat(tokenizer, chat, chat_template=TEMPLATE, add_generation_prompt=False)[-1]
        != encode(tokenizer, "]")[-1]
    )
    assert decode(tokenizer, render_chat(tokenizer, chat, chat_template="{{ style }}", style="cat"), False) == "cat"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list"),
        ("hi", "list of dicts"),
        ({"role": "user", "content": "hi"}, "list of dicts"),
        (["hi"], "message 0 must be a dict"),
        ([{"role": "user", "content": "a"}, {"content": "hi"}], "message 1 must be a dict"),
        ([{"role": "user"}], "content of message 0"),
        ([{"role": "user", "content": ["hi"]}], "must be a string, not list"),
        ([{"role": "user", "content": "\udfff"}], "surrogate"),
    ],
)
def test_malformed_chats_are_refused_in_one_line(messages: Any, message: str) -> None:
    with pytest.raises(ForedraftError, match=message) as caught:
        render_chat(build("byte-level"), messages, chat_template=TEMPLATE.replace("{{ bos_token }}", ""))
    assert "\n" not in str(caught.value)


def test_a_tool_call_needs_no_content() -> None:
    chat = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    assert render_chat(build("byte-level"), chat, chat_template="{{ messages[0].role }}")


CONCATENATES = "{% for m in messages %}{{ m['role'] + ':' + m['content'] }};{% endfor %}"
WRITES_CALLS = "{% for m in messages %}{{ m['role'] + m['content'] }}{% for c in m.tool_calls %}[{{ c.function.name }}]{% endfor %};{% endfor %}"
ASKS_FOR_NONE = (
    "{% for m in messages %}{% if m['content'] is none %}{% for c in m.tool_calls %}[{{ c.function.name }}]{% endfor %}"
    "{% else %}{{ m['role'] + m['content'] }}{% endif %};{% endfor %}"
)
ASKS_WHETHER_IT_IS_THERE = ASKS_FOR_NONE.replace("m['content'] is none", "m['content'] is not defined")


@pytest.mark.parametrize("content", [{"content": None}, {}], ids=str)
@pytest.mark.parametrize(
    ("template", "text"),
    [
        (CONCATENATES, "assistant:;tool:3;"),
        (WRITES_CALLS, "assistant[f];tool3;"),
        (ASKS_WHETHER_IT_IS_THERE, "[f];tool3;"),
    ],
)
def test_a_message_may_have_tool_calls_and_no_content(content: dict[str, None], template: str, text: str) -> None:
    """Templates that know no tools (ChatML's) concatenate the content; others write the calls."""
    tokenizer = build("byte-level")
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    chat = [{"role": "assistant", **content, "tool_calls": calls}, {"role": "tool", "content": "3"}]
    assert decode(tokenizer, render_chat(tokenizer, chat, chat_template=template), False) == text


def test_a_template_that_would_leave_a_call_out_is_refused() -> None:
    """Like DeepSeek-V3's, which asks whether the content is none, while the library leaves such a content out."""
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    chat = [{"role": "assistant", "content": None, "tool_calls": calls}]
    with pytest.raises(ForedraftError, match="the chat template fails on these messages"):
        render_chat(build("byte-level"), chat, chat_template=ASKS_FOR_NONE.replace("m['role'] + ", "'' + "))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template: pass chat_template="),
        ("{% if %}", "chat template fails"),
        ("{{ raise_exception('roles must\n\nalternate') }}", "fails on these messages: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "chat template fails"),
        ("{{ 1 // 0 }}", "chat template fails on these messages: integer division"),
        ("{{ 2.0 ** 10000 }}", "chat template fails"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat template fails"),
        ("{{ '' }}", "prompt is empty"),
    ],
)
def test_templates_that_fail_are_reported_in_one_line(template: str | None, message: str) -> None:
    with pytest.raises(ForedraftError, match=message) as caught:
        render_chat(build("byte-level"), [{"role": "user", "content": "hi"}], chat_template=template)
    assert "\n" not in str(caught.value)
