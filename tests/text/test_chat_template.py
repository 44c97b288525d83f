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


@pytest.mark.parametrize("content", [{"content": None}, {}], ids=str)
def test_templates_may_concatenate_the_content_of_a_tool_call(content: dict[str, None]) -> None:
    """As ChatML's do."""
    tokenizer = build("byte-level")
    chat = [{"role": "assistant", **content, "tool_calls": [{"name": "f"}]}, {"role": "tool", "content": "3"}]
    ids = render_chat(
        tokenizer, chat, chat_template="{% for m in messages %}{{ m['role'] + ':' + m['content'] }}{% endfor %}"
    )
    assert decode(tokenizer, ids, False) == "assistant:tool:3"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template: pass chat_template="),
        ("{% if %}", "chat template fails"),
        ("{{ raise_exception('roles must\n\nalternate') }}", "fails on these messages: roles must alternate"),
        ("{{ messages[0].content + 1 }}", "chat template fails"),
        ("{{ '' }}", "prompt is empty"),
    ],
)
def test_templates_that_fail_are_reported_in_one_line(template: str | None, message: str) -> None:
    with pytest.raises(ForedraftError, match=message) as caught:
        render_chat(build("byte-level"), [{"role": "user", "content": "hi"}], chat_template=template)
    assert "\n" not in str(caught.value)
