"""Deltas and outputs become answers, without a socket: joined chunks equal the whole answer."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from foredraft.engine.sequence import Origin
from foredraft.engine.stats import SpeculationStats
from foredraft.server.wire.chat_builder import ChatBuilder
from foredraft.server.wire.chat_request import ChatRequest
from foredraft.server.wire.completion_builder import CompletionBuilder
from foredraft.server.wire.completion_request import CompletionRequest
from foredraft.server.wire.response_builder import ResponseHead
from foredraft.server.wire.usage import metrics_of, usage_of
from foredraft.text.outputs import (
    CompletionOutput,
    Delta,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SpeculativeDecodingMetrics,
)

HEAD = ResponseHead("id-1", "pair", 7)
Pieces = list[tuple[str, list[int]]]


def output_of(texts: Sequence[Pieces], *, num_prompt: int = 3, logprobs: bool = False) -> RequestOutput:
    stats = SpeculationStats(num_steps=1)
    return RequestOutput(
        request_id="0",
        prompt="hello",
        prompt_token_ids=list(range(num_prompt)),
        prompt_logprobs=None,
        outputs=[
            CompletionOutput(
                index=index,
                text="".join(text for text, _ in pieces),
                token_ids=[token for _, ids in pieces for token in ids],
                origins=[],
                cumulative_logprob=None,
                logprobs=[entry(token) for _, ids in pieces for token in ids] if logprobs else None,
                finish_reason="length",
                stop_reason=None,
                text_offsets=offsets_of(pieces) if logprobs else None,
            )
            for index, pieces in enumerate(texts)
        ],
        finished=True,
        metrics=RequestMetrics(
            time_to_first_token=0.5,
            inter_token_latency=0.1,
            tokens_per_second=10.0,
            num_preemptions=1,
            num_cached_tokens=2,
            speculative_decoding=SpeculativeDecodingMetrics.of(stats),
            stats=stats,
        ),
    )


def offsets_of(pieces: Pieces) -> list[int]:
    """An offset for each token: where its delta begins."""
    begins = accumulate((len(text) for text, _ in pieces), initial=0)
    return [begin for begin, (_, ids) in zip(begins, pieces, strict=False) for _ in ids]


def entry(token: int) -> dict[int, Logprob]:
    return {token: Logprob(-2.0, 2, f"<{token}>"), token + 1: Logprob(-1.0, 1, f"<{token + 1}>")}


def deltas_of(texts: Sequence[Pieces], output: RequestOutput, *, logprobs: bool = False) -> list[Delta]:
    """Deltas of several texts in turn; the last one has the output."""
    rounds = max(map(len, texts))
    found = [
        Delta(
            index,
            pieces[step][0],
            pieces[step][1],
            [Origin.PLAIN] * len(pieces[step][1]),
            "length" if step == len(pieces) - 1 else None,
            None,
            [entry(token) for token in pieces[step][1]] if logprobs else None,
            text_offsets=offsets_of(pieces[: step + 1])[-len(pieces[step][1]) :] if logprobs else None,
        )
        for step in range(rounds)
        for index, pieces in enumerate(texts)
        if step < len(pieces)
    ]
    last = found[-1]
    return [*found[:-1], replace(last, finish_reason="length", output=output)]


PIECES = st.lists(
    st.tuples(st.text(max_size=3), st.lists(st.integers(0, 99), min_size=1, max_size=3)), min_size=1, max_size=5
)


@given(st.lists(PIECES, min_size=1, max_size=3), st.booleans())
def test_chunks_of_a_completion_join_to_the_whole(texts: list[Pieces], logprobs: bool) -> None:
    body = CompletionRequest.model_validate(
        {"prompt": "hello", "n": len(texts), "logprobs": 1 if logprobs else None, "return_token_ids": True}
    )
    output = output_of(texts, logprobs=logprobs)
    whole: Any = CompletionBuilder(body, HEAD, [""]).response([output])
    writer = CompletionBuilder(body, HEAD, [""], [output.prompt_token_ids])
    chunks: list[Any] = [c for delta in deltas_of(texts, output, logprobs=logprobs) for c in writer.chunks(0, delta)]
    for choice in whole.choices:
        parts = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [token for part in parts for token in part.token_ids] == choice.token_ids
        assert [part.prompt_token_ids for part in parts] == [choice.prompt_token_ids] + [None] * (len(parts) - 1)
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
        if logprobs:
            assert [token for part in parts for token in part.logprobs.tokens] == choice.logprobs.tokens
            assert [offset for part in parts for offset in part.logprobs.text_offset] == choice.logprobs.text_offset


@given(st.lists(PIECES, min_size=1, max_size=3))
def test_chunks_of_a_chat_join_to_the_whole(texts: list[Pieces]) -> None:
    body = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "x"}], "n": len(texts), "logprobs": True, "top_logprobs": 1}
    )
    output = output_of(texts, logprobs=True)
    whole: Any = ChatBuilder(body, HEAD).response([output])
    writer = ChatBuilder(body, HEAD)
    chunks: list[Any] = [c for delta in deltas_of(texts, output, logprobs=True) for c in writer.chunks(0, delta)]
    for choice in whole.choices:
        parts = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
        assert [part.delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        shown = [token for part in parts if part.logprobs for token in part.logprobs.content]
        assert shown == choice.logprobs.content
        assert all(len(token.top_logprobs) == 1 and token.top_logprobs[0].logprob == -1.0 for token in shown)


def test_a_delta_without_text_is_no_chunk() -> None:
    body = CompletionRequest.model_validate({"prompt": "hello"})
    assert CompletionBuilder(body, HEAD, [""]).chunks(0, Delta(0, "", [1], [])) == []


def test_choices_are_numbered_over_prompts_and_texts() -> None:
    body = CompletionRequest.model_validate({"prompt": ["a", "b"], "n": 2, "echo": True})
    writer = CompletionBuilder(body, HEAD, ["a", "b"])
    found: Any = [
        chunk for place in (0, 1) for index in (0, 1) for chunk in writer.chunks(place, Delta(index, "x", [1], []))
    ]
    assert [(c.choices[0].index, c.choices[0].text) for c in found] == [(0, "ax"), (1, "ax"), (2, "bx"), (3, "bx")]
    again: Any = writer.chunks(1, Delta(1, "y", [1], []))
    assert again[0].choices[0].text == "y"


def test_usage_and_metrics_come_last_and_only_if_requested() -> None:
    output = output_of([[("a", [1, 2])], [("b", [3])]])
    plain = CompletionRequest.model_validate({"prompt": "a", "stream": True})
    assert CompletionBuilder(plain, HEAD, [""]).last_chunks([output]) == []
    asked = CompletionRequest.model_validate(
        {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}, "metrics": True}
    )
    (last,) = CompletionBuilder(asked, HEAD, [""]).last_chunks([output])
    shown: Any = last
    assert shown.choices == []
    assert (shown.usage.prompt_tokens, shown.usage.completion_tokens, shown.usage.total_tokens) == (3, 3, 6)
    assert shown.metrics["num_preemptions"] == 1


def test_numbers_of_several_prompts_are_added_up() -> None:
    outputs = [output_of([[("a", [1])]]), output_of([[("b", [1, 2])]])]
    assert usage_of(outputs).completion_tokens == 3
    assert usage_of(outputs).prompt_tokens_details.cached_tokens == 4
    merged = metrics_of(outputs)
    assert merged["stats"]["num_steps"] == merged["num_preemptions"] == 2
    assert merged["num_cached_tokens"] == 4
    assert merged["tokens_per_second"] is None


def test_times_of_several_prompts_are_the_shortest() -> None:
    outputs = [output_of([[("a", [1])]]) for _ in range(3)]
    waits, firsts = (0.4, None, 0.2), (0.5, None, 0.3)
    timed = [
        replace(output, metrics=replace(output.metrics, time_in_queue=wait, time_to_first_token=first))
        for output, wait, first in zip(outputs, waits, firsts, strict=True)
    ]
    merged = metrics_of(timed)
    assert (merged["time_in_queue"], merged["time_to_first_token"]) == (0.2, 0.3)
    assert metrics_of(timed[1:2] * 2)["time_in_queue"] is None


def test_minus_infinity_is_sent_as_a_finite_logprob() -> None:
    """JSON has no minus infinity."""
    never = {7: Logprob(-1.0, 1, "a"), 8: Logprob(-math.inf, 2, "b")}
    body = CompletionRequest.model_validate({"prompt": "a", "logprobs": 2})
    (chunk,) = CompletionBuilder(body, HEAD, [""]).chunks(0, Delta(0, "a", [7], [], logprobs=[never], text_offsets=[0]))
    shown = json.loads(chunk.model_dump_json())
    assert shown["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -1.0, "b": -9999.0}]


def test_the_chosen_token_is_reported_before_others_with_the_same_text() -> None:
    """Each part of a character is shown as U+FFFD."""
    parts = {7: Logprob(-3.0, 3, "\ufffd"), 8: Logprob(-1.0, 1, "\ufffd"), 9: Logprob(-2.0, 2, "a")}
    body = CompletionRequest.model_validate({"prompt": "a", "logprobs": 2})
    delta = Delta(0, "", [7], [], logprobs=[parts], text_offsets=[0])
    (chunk,) = CompletionBuilder(body, HEAD, [""]).chunks(0, delta)
    shown: Any = chunk
    assert shown.choices[0].logprobs.top_logprobs == [{"\ufffd": -3.0, "a": -2.0}]


def test_absent_fields_are_omitted() -> None:
    body = CompletionRequest.model_validate({"prompt": "a"})
    shown = CompletionBuilder(body, HEAD, [""]).response([output_of([[("a", [1])]])]).model_dump()
    assert "metrics" not in shown
    assert shown["choices"][0].keys() == {"index", "text", "logprobs", "finish_reason", "stop_reason"}
