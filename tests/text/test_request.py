"""What the caller of a request gets: deltas that join to its output, one output for n texts, and errors."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.engine.sequence import Origin, TokenLogprobs, TokenSequence
from foredraft.engine.sources import NO_SOURCE
from foredraft.errors import ForedraftError, RequestError
from foredraft.model import ModelInputs
from foredraft.sampling import SamplingParams
from foredraft.text.request import Request
from foredraft.text.stream import TextStream
from tests.laws import sampler_for
from tests.text.toy_tokenizers import build, encode

PROMPT = "the"


def make_request(n: int = 1, *, has_tokenizer: bool = True, **settings: Any) -> Request:
    """A request to continue PROMPT, with n sequences of at most 20 new tokens."""
    tokenizer = build("byte-level")
    params = SamplingParams(n=n, max_tokens=20, **settings).resolve({})
    prompt_ids = encode(tokenizer, PROMPT)
    request = Request(
        "r",
        PROMPT,
        prompt_ids,
        ModelInputs(NO_SOURCE, prompt_ids),
        params,
        tokenizer if has_tokenizer else None,
        bad_words=[],
    )
    for child in range(n):
        stream = TextStream.for_request(tokenizer, prompt_ids, params) if has_tokenizer else None
        sampler = sampler_for({}, prompt=prompt_ids)
        max_len = len(prompt_ids) + 20
        sequence = TokenSequence(child, list(prompt_ids), sampler, max_len, speculative_tokens=4, stop_rule=stream)
        request.add_text(sequence, stream)
    return request


def write(request: Request, text: str, index: int = 0, *, num_drafted: int = 0) -> list[int]:
    """Commit one verified block to a sequence. -> its ids"""
    ids = encode(build("byte-level"), text)
    request.sequences[index].commit(ids, num_drafted)
    return ids


def test_deltas_have_the_new_text_and_the_last_one_the_output() -> None:
    request = make_request()
    assert request.deltas() == []
    num_drafted = len(encode(build("byte-level"), " cat, dog")) - 1
    assert num_drafted > 0
    ids = write(request, " cat, dog", num_drafted=num_drafted)
    (first,) = request.deltas()
    assert (first.index, first.text, first.token_ids, first.output) == (0, " cat, dog", ids, None)
    assert first.origins == [*[Origin.ACCEPTED] * num_drafted, Origin.BONUS]
    assert first.finish_reason is first.stop_reason is None
    assert request.deltas() == []
    more = write(request, " sat")
    request.sequences[0].finish("length")
    (last,) = request.deltas()
    assert (last.text, last.token_ids, last.finish_reason) == (" sat", more, "length")
    assert last.output == request.output()
    assert last.output.outputs[0].text == " cat, dog sat"
    assert last.output.outputs[0].token_ids == ids + more
    assert request.deltas() == []


def test_a_text_may_end_without_a_new_token() -> None:
    request = make_request()
    write(request, " cat")
    request.deltas()
    request.sequences[0].finish("abort")
    (last,) = request.deltas()
    assert (last.text, last.token_ids, last.finish_reason) == ("", [], "abort")
    assert last.output is not None


def test_the_output_comes_with_the_last_of_n_texts() -> None:
    request = make_request(n=2)
    write(request, " cat", 1)
    request.sequences[1].finish("length")
    (delta,) = request.deltas()
    assert (delta.index, delta.finish_reason, delta.output) == (1, "length", None)
    assert not request.is_finished
    write(request, " dog", 0)
    request.sequences[0].finish("length")
    (delta,) = request.deltas()
    assert request.is_finished
    assert delta.index == 0
    assert delta.output is not None
    assert [completion.text for completion in delta.output.outputs] == [" dog", " cat"]
    assert [completion.index for completion in delta.output.outputs] == [0, 1]


def test_a_stop_string_is_the_stop_reason_of_the_last_delta_and_the_output() -> None:
    request = make_request(stop=["at s"])
    write(request, " cat sat")
    (delta,) = request.deltas()
    assert (delta.text, delta.finish_reason, delta.stop_reason) == (" c", "stop", "at s")
    completion = request.output().outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (" c", "stop", "at s")


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    request = make_request(stop=["at s"])
    write(request, " cat")
    assert [delta.text for delta in request.deltas()] == [" c"]
    request.sequences[0].finish("length")
    assert [delta.text for delta in request.deltas()] == ["at"]


def test_logprobs_come_with_their_tokens_if_requested() -> None:
    entries = [TokenLogprobs(5, -0.5, 2, [6, 5], [-0.25, -0.5]), TokenLogprobs(6, -1.0, 1, [6], [-1.0])]
    for settings, expected in (({"logprobs": 1}, [5, 6]), ({}, None)):
        request = make_request(**settings)
        (sequence,) = request.sequences
        sequence.commit([5], 0)
        sequence.logprobs.append(entries[0])
        (first,) = request.deltas()
        sequence.commit([6], 0)
        sequence.logprobs.append(entries[1])
        (second,) = request.deltas()
        completion = request.output().outputs[0]
        if expected is None:
            assert first.logprobs is second.logprobs is completion.logprobs is completion.cumulative_logprob is None
            continue
        assert first.logprobs is not None
        assert second.logprobs is not None
        assert completion.logprobs == first.logprobs + second.logprobs
        assert completion.cumulative_logprob == -1.5
        assert list(first.logprobs[0]) == [5, 6]  # the token's own first, then the most likely others
        assert [(entry.logprob, entry.rank) for entry in first.logprobs[0].values()] == [(-0.5, 2), (-0.25, 1)]
        assert first.logprobs[0][5].decoded_token == build("byte-level").decode([5])


def test_prompt_logprobs_begin_with_none() -> None:
    request = make_request(prompt_logprobs=0)
    request.sequences[0].prompt_logprobs.append(TokenLogprobs(7, -2.0, 3, [], []))
    first, second = request.output().prompt_logprobs or []
    assert first is None
    assert second is not None
    assert (second[7].logprob, second[7].rank) == (-2.0, 3)
    assert make_request().output().prompt_logprobs is None


def test_without_a_tokenizer_there_are_ids_and_no_text() -> None:
    request = make_request(has_tokenizer=False, logprobs=0)
    (sequence,) = request.sequences
    sequence.commit([5], 0)
    sequence.logprobs.append(TokenLogprobs(5, -0.5, 1, [], []))
    (delta,) = request.deltas()
    assert (delta.text, delta.token_ids) == ("", [5])
    assert delta.logprobs is not None
    assert delta.logprobs[0][5].decoded_token is None
    assert request.output().outputs[0].text == ""


def test_the_prompts_text_is_the_given_one_or_the_decoded_ids() -> None:
    request = make_request()
    assert request.prompt_text == PROMPT
    request.prompt = None
    assert request.prompt_text == PROMPT
    request.tokenizer = None
    assert request.prompt_text == ""


def test_metrics_are_of_all_texts() -> None:
    request = make_request(n=2)
    first, second = request.sequences
    for sequence, times in ((first, (10.0, 10.5, 11.0, 12.0)), (second, (10.0, 10.25, 12.0, 14.0))):
        sequence.tokens += [5, 5, 5]
        sequence.arrived_at, sequence.begun_at, sequence.first_token_at, sequence.last_token_at = times
        sequence.num_preemptions = 2
        sequence.stats.record(num_drafted=3, num_accepted=2, num_kept=3)
    first.num_cached = 1
    metrics = request.output().metrics
    assert metrics.time_in_queue == 0.25
    assert metrics.time_to_first_token == 1.0
    assert metrics.inter_token_latency == (1.0 + 2.0) / 4
    assert metrics.tokens_per_second == 6 / 4.0
    assert (metrics.num_preemptions, metrics.num_cached_tokens) == (4, 1)
    assert metrics.stats == first.stats + second.stats
    assert metrics.speculative_decoding.num_draft_tokens == 6
    assert metrics.speculative_decoding.draft_acceptance_rate == 4 / 6


def test_before_the_first_token_there_are_no_times() -> None:
    metrics = make_request().output().metrics
    assert metrics.time_in_queue is metrics.time_to_first_token is None
    assert metrics.inter_token_latency is metrics.tokens_per_second is None


def test_an_error_of_a_sequence_is_the_error_of_its_request() -> None:
    request = make_request(n=2)
    assert request.error is None
    raised = KeyError("oops")
    request.sequences[1].fail(raised)
    assert request.error == "KeyError: 'oops'"
    error = request.as_error()
    assert isinstance(error, RequestError)
    assert str(error) == "request r: KeyError: 'oops'"
    assert error.__cause__ is raised
    assert error.outputs == [request.output()]
    assert [completion.finish_reason for completion in request.output().outputs] == [None, "error"]


def test_the_first_error_is_kept_and_own_errors_have_no_prefix() -> None:
    request = make_request()
    request.fail(ForedraftError("too long"))
    request.fail(ValueError("later"))
    assert request.error == "too long"
    other = make_request().output()
    assert request.as_error([other]).outputs == [other]
    assert str(request.as_error([other], "prompt 1: ")) == "prompt 1: too long"


def test_an_output_that_cannot_be_made_fails_the_request_and_keeps_the_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    request = make_request()
    ids = write(request, " cat")
    raised = ZeroDivisionError("text")

    def fail(self: TextStream) -> str:
        raise raised

    monkeypatch.setattr(TextStream, "text", property(fail))
    output = request.final_output()
    assert request.failure is raised
    (completion,) = output.outputs
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("", ids, "error")
    assert completion.error == "ZeroDivisionError: text"


def test_a_request_that_was_never_started_is_finished_and_has_no_texts() -> None:
    request = make_request()
    request.texts.clear()
    assert request.is_finished
    assert request.deltas() == []
    assert request.final_output().outputs == []


def test_offsets_are_those_in_the_whole_text() -> None:
    """Although the text of a delta may be held back, for a stop string or for an unfinished character."""
    request = make_request(logprobs=0, stop=[" x y"])
    deltas = []
    for part in ("é x", " 😀", " x", " y"):
        write(request, part)
        deltas += request.deltas()
    (found,) = request.output().outputs
    assert found.text == "é x 😀"
    assert found.text_offsets is not None
    assert [offset for delta in deltas for offset in delta.text_offsets or ()] == found.text_offsets
    assert len(found.text_offsets) == len(found.token_ids)
    assert "".join(dict.fromkeys(found.text[offset:] for offset in found.text_offsets)).startswith("é x 😀")


def test_offsets_come_with_log_probabilities_only() -> None:
    request = make_request()
    write(request, " cat")
    (delta,) = request.deltas()
    assert delta.text_offsets is request.output().outputs[0].text_offsets is None
    assert request.output().prompt_text_offsets is None


def test_offsets_of_a_prompt_are_those_in_its_text() -> None:
    request = make_request(prompt_logprobs=0)
    eos = build("byte-level").eos_token_id
    request.prompt, request.prompt_ids = "a<eos>é", [eos, *encode(build("byte-level"), "a<eos>é")]
    offsets = request.output().prompt_text_offsets
    assert offsets == [0, 0, 1, *[1 + len("<eos>")] * (len(request.prompt_ids) - 3)]
    request.prompt = None
    assert request.prompt_text == "aé"
    assert request.output().prompt_text_offsets == [0, 0, 1, *[1] * (len(request.prompt_ids) - 3)]
