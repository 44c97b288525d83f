"""From prompts to requests and sequences: what is refused, what the engine gets, and how requests run and end."""

from __future__ import annotations

from contextlib import closing
from typing import Any, cast

import pytest

from foredraft.engine.engine import Engine
from foredraft.engine.sequence import TokenSequence
from foredraft.engine.sources import NO_SOURCE, Source, TokenSource
from foredraft.errors import ForedraftError, RequestError
from foredraft.model import ModelInputs
from foredraft.sampling import SamplingParams, StructuredOutputs
from foredraft.text.frontend import Frontend
from foredraft.text.request import Request
from tests.laws import sampler_for
from tests.text.toy_tokenizers import build, encode

CAT = 4


class FakeModel:
    """has_encoder: whether it reads prompts as sources and begins its texts with the id 9."""

    def __init__(self, *, has_encoder: bool) -> None:
        self.has_encoder = has_encoder

    def check_reads_text(self) -> None:
        """Accept: it reads text."""

    def inputs_for(self, prompt: list[int]) -> ModelInputs:
        return (
            ModelInputs(TokenSource(tuple(prompt)), [9]) if self.has_encoder else ModelInputs(NO_SOURCE, list(prompt))
        )


class FakeEngine:
    """Writes one token for every sequence in each step."""

    def __init__(self, *, has_encoder: bool = False) -> None:
        self.model = FakeModel(has_encoder=has_encoder)
        self.end_ids = frozenset({0})
        self.added: list[dict[str, Any]] = []
        self.sequences: list[TokenSequence] = []
        self.num_steps = 0

    def check(self, prompt: list[int], params: SamplingParams, source: Source = NO_SOURCE) -> int:
        if len(prompt) > 50:
            raise ForedraftError("the prompt is too long")
        return len(prompt) + (params.max_tokens or 0)

    def add(self, prompt: list[int], params: SamplingParams, **settings: Any) -> TokenSequence:
        self.added.append(settings)
        sequence = TokenSequence(
            len(self.sequences),
            list(prompt),
            sampler_for({}, prompt=prompt),
            max_len=self.check(prompt, params),
            speculative_tokens=None,
            stop_rule=settings["stop_rule"],
        )
        self.sequences.append(sequence)
        return sequence

    def step(self) -> None:
        self.num_steps += 1
        for sequence in self.sequences:
            if not sequence.is_finished:
                sequence.commit([CAT], 0)

    def abort(self, sequence: TokenSequence) -> None:
        sequence.finish("abort")


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def frontend(engine: FakeEngine) -> Frontend:
    return Frontend(cast(Engine, engine), build("byte-level"), {"temperature": 0.5, "top_k": 7})


def params(max_tokens: int = 3, **settings: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **settings)


def test_a_prompt_is_text_ids_or_a_dict_of_either(frontend: Frontend) -> None:
    ids = encode(build("byte-level"), "cat")
    for prompt, text in (("cat", "cat"), ({"prompt": "cat"}, "cat"), (ids, None), ({"prompt_token_ids": ids}, None)):
        request = frontend.prepare(prompt, None)
        assert (request.prompt, request.prompt_ids) == (text, ids)


def test_a_prompt_of_an_encoder_decoder_is_its_source() -> None:
    engine, ids = FakeEngine(has_encoder=True), encode(build("byte-level"), "cat")
    frontend = Frontend(cast(Engine, engine), build("byte-level"), {})
    for prompt, beginning in (("cat", [9]), ({"prompt": "cat", "decoder_prompt_token_ids": [9, 3]}, [9, 3])):
        request = frontend.prepare(prompt, None)
        assert request.prompt_ids == ids
        assert request.inputs == (TokenSource(tuple(ids)), beginning)
        frontend.start(request)
        assert engine.added[-1]["source"] == TokenSource(tuple(ids))
        assert engine.sequences[-1].tokens == beginning
    with pytest.raises(ForedraftError, match="must be text or a list of token ids"):
        frontend.prepare({"prompt": "cat", "decoder_prompt_token_ids": "x"}, None)


@pytest.mark.parametrize(
    ("prompt", "settings", "words"),
    [
        ("", {}, "the prompt is empty"),
        ({"text": "cat"}, {}, 'needs "prompt" or "prompt_token_ids"'),
        ([1, "a"], {}, "text or a list of token ids"),
        ([True], {}, "text or a list of token ids"),
        ({"prompt_token_ids": "cat"}, {}, "text or a list of token ids"),
        (7, {}, "must be a string or a list of token ids"),
        ([1] * 51, {}, "too long"),
        ("cat", {"priority": 1.5}, "priority must be an integer, not 1.5"),
        ("cat", {"priority": True}, "priority must be an integer, not True"),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_runs(
    frontend: Frontend, engine: FakeEngine, prompt: Any, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ForedraftError, match=words) as caught:
        frontend.prepare(prompt, None, **settings)
    assert "\n" not in str(caught.value)
    assert engine.added == []


def test_parameters_must_be_sampling_params(frontend: Frontend) -> None:
    with pytest.raises(ForedraftError, match="sampling_params must be SamplingParams, not dict"):
        frontend.prepare("cat", {"temperature": 0})  # type: ignore[arg-type]


def test_the_checkpoints_defaults_fill_what_a_request_leaves_open(frontend: Frontend) -> None:
    assert (frontend.prepare("cat", None).params.temperature, frontend.prepare("cat", None).params.top_k) == (0.5, 7)
    own = frontend.prepare("cat", params(temperature=0.0)).params
    assert (own.temperature, own.top_k, own.max_tokens) == (0.0, 7, 3)


def test_requests_are_numbered_unless_they_have_a_name(frontend: Frontend) -> None:
    names = [frontend.prepare("cat", None, request_id=name).request_id for name in (None, "mine", None)]
    assert names == ["0", "mine", "1"]


@pytest.mark.parametrize(
    "settings", [{"stop": "x"}, {"bad_words": ["x"]}, {"structured_outputs": StructuredOutputs(regex="a")}]
)
def test_without_a_tokenizer_only_ids_are_accepted(engine: FakeEngine, settings: dict[str, Any]) -> None:
    frontend = Frontend(cast(Engine, engine), None, {})
    assert frontend.prepare([1, 2], None).prompt_ids == [1, 2]
    with pytest.raises(ForedraftError, match="need a tokenizer: give tokenizer="):
        frontend.prepare([1, 2], params(**settings))
    with pytest.raises(ForedraftError, match="a text prompt needs a tokenizer"):
        frontend.prepare("cat", None)


def test_only_new_grammars_are_compiled(frontend: Frontend) -> None:
    structured = params(structured_outputs=StructuredOutputs(choice=["yes", "no"]))
    assert not frontend.must_compile(None)
    assert not frontend.must_compile(params())
    assert frontend.must_compile(structured)
    assert frontend.prepare("cat", structured).grammar is not None
    assert not frontend.must_compile(structured)


def test_each_of_n_texts_is_a_sequence_and_waits_for_the_first(frontend: Frontend, engine: FakeEngine) -> None:
    request = frontend.prepare("cat", params(n=3, bad_words=["dog"]), client="c", priority=2)
    frontend.start(request)
    assert [added["child"] for added in engine.added] == [0, 1, 2]
    assert [added["wait_for"] for added in engine.added] == [None, *[request.sequences[0]] * 2]
    assert all((added["client"], added["priority"]) == ("c", 2) for added in engine.added)
    assert all(added["bad_words"] == request.bad_words != [] for added in engine.added)
    assert len({id(added["stop_rule"]) for added in engine.added}) == 3


def test_without_prefix_caching_texts_do_not_wait_for_the_first(frontend: Frontend, engine: FakeEngine) -> None:
    frontend.start(frontend.prepare("cat", params(n=2, prefix_caching=False)))
    assert [added["wait_for"] for added in engine.added] == [None, None]


def test_requests_run_together_to_their_end(frontend: Frontend, engine: FakeEngine) -> None:
    requests = [frontend.prepare("cat", params(max_tokens)) for max_tokens in (2, 5)]
    num_done = [sum(request.is_finished for request in requests) for _ in frontend.steps(requests)]
    assert num_done == [0, 1, 1, 1, 2]
    assert engine.num_steps == 5
    frontend.run(more := [frontend.prepare("cat", params(4))])
    assert more[0].output().outputs[0].token_ids == [CAT] * 4


def test_closing_the_steps_aborts_running_requests(frontend: Frontend) -> None:
    requests = [frontend.prepare("cat", params(max_tokens)) for max_tokens in (1, 5)]
    with closing(frontend.steps(requests)) as steps:
        next(steps)
    assert [request.sequences[0].finish_reason for request in requests] == ["length", "abort"]


def test_a_request_that_cannot_start_fails_alone(
    frontend: Frontend, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised, add = KeyError("oops"), engine.add

    def faulty(prompt: list[int], params: SamplingParams, **settings: Any) -> TokenSequence:
        if settings["child"] == 1:
            raise raised
        return add(prompt, params, **settings)

    monkeypatch.setattr(engine, "add", faulty)
    good, bad = frontend.prepare("cat", params()), frontend.prepare("cat", params(n=2))
    with pytest.raises(RequestError, match="request 1: KeyError: 'oops'") as caught:
        frontend.run([bad, good])
    assert caught.value.__cause__ is raised
    assert bad.sequences[0].finish_reason == "abort"  # the one of its texts that did start
    assert good.output().outputs[0].finish_reason == "length"
    with pytest.raises(KeyError):
        frontend.start(frontend.prepare("cat", params(n=2)))


def test_aborting_before_and_after_a_run_is_harmless(frontend: Frontend) -> None:
    request: Request = frontend.prepare("cat", params())
    frontend.abort(request)
    frontend.run([request])
    frontend.abort(request)
    assert request.output().outputs[0].finish_reason == "length"
