"""A trace records what happened: the counts of the run, the tokens of the output, and p and q of the two distributions."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from foredraft import LLM, ForedraftError, SamplingParams
from foredraft.drafters import ScriptedDrafter
from foredraft.engine.engine import Engine
from foredraft.engine.proposal import DraftRequest, Proposal
from foredraft.engine.scheduler import Limits
from foredraft.engine.sequence import TokenSequence
from foredraft.engine.stats import SpeculationStats
from foredraft.engine.step import Step
from foredraft.engine.token_tree import ROOT
from foredraft.sampling import Row, adjusted, token_probs_of
from foredraft.trace import Recorder, Trace, read_trace, record, recorder, write_page
from foredraft.trace.format import Header
from tests.scripts import continuations_of

CODE, STORY = "def read_lines(path):", "Once upon a time"
HEADER = Header(foredraft="0", created="2026-01-01T00:00:00+00:00")
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95)
KINDS = {
    "greedy": SamplingParams(max_tokens=24, temperature=0.0),
    "sampled": SAMPLED,
    "seeded": SamplingParams(max_tokens=24, temperature=1.0, seed=5, repetition_penalty=1.2),
    "two texts": SamplingParams(max_tokens=24, temperature=1.0, n=2),
    "plain": SamplingParams(max_tokens=24, temperature=0.0, speculative_tokens=0),
    "stopped": SamplingParams(max_tokens=48, temperature=0.0, stop="\n"),
}
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(seed=0, speculative_tokens=4)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def traced(engine: Engine, run: Callable[[], object], file: Path) -> Trace:
    """The trace of what `run` does with an engine."""
    with file.open("w", encoding="utf-8") as stream:
        recorder = Recorder(stream, HEADER)
        engine.observers.append(recorder)
        run()
        recorder.close()
    return read_trace(file)


def run_dry(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_counts_are_those_of_the_outputs(kind: str, llm: LLM, file: Path) -> None:
    with record(llm, file):
        outputs = llm.generate([CODE, STORY], KINDS[kind])
    trace = read_trace(file)
    assert trace.is_complete
    texts = sorted(trace.texts, key=lambda text: (text.begin.prompt_ids, text.begin.child))
    wanted = sorted(
        ((out.prompt_token_ids, text.index, text, out) for out in outputs for text in out.outputs),
        key=lambda one: one[:2],
    )
    assert [text.token_ids for text in texts] == [one.token_ids for _, _, one, _ in wanted]
    for text, (prompt_ids, _, one, _) in zip(texts, wanted, strict=True):
        assert text.begin.prompt_ids == prompt_ids
        assert text.end is not None
        assert text.end.finish_reason == one.finish_reason
    found = sum((out.metrics.stats for out in outputs), SpeculationStats())
    found.num_near_ties = 0  # rounds do not contain them
    assert trace.stats == found


def test_the_pieces_of_a_text_join_to_it(llm: LLM, file: Path) -> None:
    assert llm.tokenizer is not None
    prompt = "# größe, naïveté, 你好\nword = '"
    with record(llm, file):
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=64, temperature=1.2, seed=3, ignore_eos=True))
    (text,) = read_trace(file).texts
    found = "".join(token.text for one in text.rounds for token in one.kept)
    whole = llm.tokenizer.decode(output.outputs[0].token_ids)
    assert whole.startswith(found)
    assert len(whole) - len(found) < 4  # the bytes of a character that the last token left incomplete
    assert text.begin.prompt == llm.tokenizer.decode(output.prompt_token_ids)


def test_requests_of_every_kind_in_one_batch_are_recorded(llm: LLM, file: Path) -> None:
    """Each of them has its own rounds."""
    with record(llm, file):
        outputs = llm.generate([CODE] * len(KINDS), list(KINDS.values()))
    trace = read_trace(file)
    assert sorted(text.token_ids for text in trace.texts) == sorted(t.token_ids for o in outputs for t in o.outputs)


def plain_text(make_engine: MakeEngine, prompt: list[int], params: SamplingParams) -> TokenSequence:
    engine = make_engine("none")
    text: TokenSequence = engine.add(prompt, params)
    run_dry(engine)
    return text


class DraftsByLaw:
    """Sampled drafts from a known distribution: q is 3/4 for id 11 and 1/4 for id 12."""

    law = torch.zeros(4096).scatter(0, torch.tensor([11, 12]), torch.tensor([0.75, 0.25]))

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        lens = torch.tensor([min(2, request.max_len) for request in requests])
        ids = torch.tensor([[11, 12]]).expand(len(requests), 2)
        rows = torch.tensor([[0, -1]]).expand(len(requests), 2)
        return Proposal(ids, lens, rows, self.law[None])

    def forget(self, seq_ids: list[int]) -> None: ...


class TokenProbs:
    """Records each round's p from the step itself."""

    def __init__(self) -> None:
        self.rounds: list[list[tuple[float, float]]] = []

    def observe(self, step: Step) -> None:
        for item, outcome, kept in zip(step.scoring, step.outcomes, step.num_kept, strict=True):
            sequence = item.sequence
            before = sequence.tokens[: len(sequence.tokens) - kept]
            drafted = [11, 12][: outcome.num_drafted]
            found = []
            for place, token in [*enumerate(drafted), (len(outcome.new_ids) - 1, outcome.new_ids[-1])]:
                row = [Row(sequence.sampler, before, drafted[:place])]
                logits = outcome.logits[place][None]
                law = token_probs_of(adjusted(logits, row).logits, row).dense(logits.shape[1])[0]
                found.append((float(law[token]), float(logits[0].float().softmax(-1)[token])))
            self.rounds.append(found)


def test_p_and_q_are_those_of_the_distributions(make_engine: MakeEngine, file: Path) -> None:
    laws = TokenProbs()
    engine = make_engine(DraftsByLaw(), observers=[laws], seed=1)
    params = SamplingParams(max_tokens=20, temperature=1.3, top_p=0.9, presence_penalty=1.0, ignore_eos=True)
    engine.add([0, 549, 300, 11, 12, 300], params.resolve({}))
    trace = traced(engine, lambda: run_dry(engine), file)
    rounds = trace.texts[0].rounds
    assert len(rounds) == len(laws.rounds) > 5
    for one, expected in zip(rounds, laws.rounds, strict=True):
        assert [token.q for token in one.draft] == [0.75, 1.0][: len(one.draft)]  # the second token was certain
        tokens = [*one.draft, *([] if one.own is None else [one.own])]
        for token, (p, p_raw) in zip(tokens, expected, strict=False):
            assert token.p == pytest.approx(p, abs=1e-6)
            assert token.p_raw == pytest.approx(p_raw, abs=1e-6)


def test_greedy_rounds_have_the_right_verdicts(make_engine: MakeEngine, file: Path) -> None:
    """With known drafts and known errors every verdict can be predicted."""
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True).resolve({})
    prompt = [0, 549, 300, 11]
    text = plain_text(make_engine, prompt, params)
    drafter = ScriptedDrafter(continuations_of({0: text.tokens}), corrupt_every=5)
    engine = make_engine(drafter, speculative_tokens=3)
    engine.add(prompt, params)
    trace = traced(engine, lambda: run_dry(engine), file)
    assert trace.texts[0].token_ids == text.output_ids
    for one in trace.texts[0].rounds:
        start = len(prompt) + one.at
        for i, token in enumerate(one.draft):
            is_right = token.id == text.tokens[start + i]
            assert is_right == bool((start + i + 1) % 5)
            first_wrong = next((j for j, t in enumerate(one.draft) if t.id != text.tokens[start + j]), len(one.draft))
            assert token.verdict == ("accepted" if i < first_wrong else "rejected" if i == first_wrong else "unused")
            if i <= first_wrong:
                assert token.p == float(is_right)
                assert token.p_raw is not None
                assert 0 < token.p_raw < 1
            assert token.q == 1.0
        assert one.own is not None
        assert one.own.p == 1.0
        expected = "recovered" if any(t.verdict == "rejected" for t in one.draft) else "bonus" if one.draft else "plain"
        assert one.own.origin == expected


class TwoBranches:
    """Drafts trees of two branches with two tokens: one continues the text, the other is wrong from its first token."""

    parents = (ROOT, ROOT, 0, 1)

    def __init__(self, text: list[int]) -> None:
        self._text = text

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        drafts = [self._draft(len(request.tokens))[: request.max_len] for request in requests]
        return Proposal.certain(drafts, [list(self.parents[: len(ids)]) for ids in drafts])

    def _draft(self, place: int) -> list[int]:
        right = [*self._text[place : place + 2], 11, 11][:2]
        wrong = (right[0] + 1) % 4096
        if place % 2:
            return [right[0], wrong, right[1], 12]
        return [wrong, right[0], 12, right[1]]

    def forget(self, seq_ids: list[int]) -> None: ...


def test_a_tree_keeps_its_branches(make_engine: MakeEngine, file: Path) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True).resolve({})
    prompt = [0, 549, 300, 11]
    text = plain_text(make_engine, prompt, params)
    engine = make_engine(TwoBranches(text.tokens), speculative_tokens=4)
    engine.add(prompt, params)
    trace = traced(engine, lambda: run_dry(engine), file)
    assert trace.texts[0].token_ids == text.output_ids
    whole = [one for one in trace.texts[0].rounds if len(one.draft) == 4 and one.own is not None]
    assert len(whole) > 3
    for one in whole:
        right, wrong = (0, 1) if one.draft[0].id == text.tokens[len(prompt) + one.at] else (1, 0)
        assert [token.parent for token in one.draft] == [ROOT, ROOT, 0, 1]
        assert [one.draft[node].verdict for node in (right, right + 2)] == ["accepted", "accepted"]
        assert [one.draft[node].verdict for node in (wrong, wrong + 2)] == ["unused", "unused"]
        assert [one.draft[node].p for node in (right, right + 2, wrong)] == [1.0, 1.0, 0.0]
        assert one.own is not None
        assert one.own.origin == "bonus"
    drafts = [token for one in trace.texts[0].rounds for token in one.draft]
    assert trace.stats.num_draft_tokens == len(drafts)
    assert trace.stats.num_accepted_tokens == sum(token.verdict == "accepted" for token in drafts)


def test_chunked_prefill_gives_steps_without_rounds(make_engine: MakeEngine, file: Path) -> None:
    engine = make_engine("ngram", limits=Limits(max_batch_tokens=8))
    engine.add([0, *range(500, 540)], SamplingParams(max_tokens=6, temperature=0.0).resolve({}))
    trace = traced(engine, lambda: run_dry(engine), file)
    first = trace.texts[0].rounds[0].step
    assert first > 3
    assert all(step.num_rows <= 8 for step in trace.steps)
    assert [step.step for step in trace.steps] == list(range(len(trace.steps)))
    assert all(a.start + a.total <= b.start + 1e-6 for a, b in zip(trace.steps, trace.steps[1:], strict=False))


def test_an_aborted_text_ends_with_the_recording(llm: LLM, file: Path) -> None:
    with record(llm, file):
        stream = llm.stream(STORY, SamplingParams(max_tokens=200, temperature=0.0))
        got = [next(stream) for _ in range(3)]
        stream.close()
        (other,) = llm.generate(CODE, KINDS["greedy"])
    trace = read_trace(file)
    assert [text.end.finish_reason for text in trace.texts if text.end] == ["abort", "length"]
    given = [token for delta in got for token in delta.token_ids]
    assert trace.texts[0].token_ids[: len(given)] == given
    assert trace.texts[1].token_ids == other.outputs[0].token_ids


def test_a_text_that_was_already_running_is_not_recorded(make_engine: MakeEngine, file: Path) -> None:
    engine = make_engine("ngram")
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True).resolve({})
    engine.add([0, 549, 300], params)
    engine.step()
    late = engine.add([0, 616, 635], params)
    trace = traced(engine, lambda: run_dry(engine), file)
    assert [text.begin.prompt_ids for text in trace.texts] == [[0, 616, 635]]
    assert trace.texts[0].token_ids == late.output_ids


def test_recording_changes_nothing(llm: LLM, file: Path) -> None:
    params = SamplingParams(max_tokens=32, temperature=0.9, seed=4, frequency_penalty=0.4, top_k=40)
    (before,) = llm.generate(CODE, params)
    with record(llm, file):
        (during,) = llm.generate(CODE, params)
    assert llm.engine.observers == []
    (after,) = llm.generate(CODE, params)
    assert before.outputs[0].token_ids == during.outputs[0].token_ids == after.outputs[0].token_ids


def test_every_line_is_json_by_itself(llm: LLM, file: Path) -> None:
    with record(llm, file):
        llm.generate(CODE, KINDS["greedy"])
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert lines[0]["type"] == "trace"
    assert lines[0]["version"] == 1
    assert lines[0]["target"]["name"] == "embedded target"
    assert lines[-1]["type"] == "close"
    assert {line["type"] for line in lines} == {"trace", "text", "step", "round", "end", "close"}


def test_another_file_is_not_replaced(llm: LLM, file: Path) -> None:
    file.write_bytes(b"weights")
    with pytest.raises(ForedraftError, match="exists, and was not written"), record(llm, file):
        pass
    assert file.read_bytes() == b"weights"
    file.write_bytes(b"")
    for _ in range(2):  # a trace may be replaced
        with record(llm, file):
            llm.generate(STORY, KINDS["greedy"])
        assert len(read_trace(file).texts) == 1
    page = file.with_suffix(".html")
    page.write_text("notes")
    with pytest.raises(ForedraftError, match="exists, and was not written"):
        write_page(read_trace(file), page)
    page.unlink()
    assert write_page(read_trace(file), page) == write_page(read_trace(file), page) == page


def test_a_line_that_cannot_be_written_ends_the_trace(
    llm: LLM, file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A lone surrogate is not JSON. The texts before it can be read, and generation continues."""
    with record(llm, file):
        llm.generate(STORY, KINDS["greedy"])
        monkeypatch.setattr(recorder, "_params", lambda params: {"stop": "\ud800"})
        (output,) = llm.generate(CODE, KINDS["greedy"])
    assert len(output.outputs[0].token_ids) == 24
    assert len(read_trace(file).texts) == 1
    (warning,) = [each.getMessage() for each in caplog.records if "the trace ends early" in each.getMessage()]
    assert "PydanticSerializationError" in warning
    assert "\n" not in warning


def test_without_a_tokenizer_ids_are_recorded(make_engine: MakeEngine) -> None:
    stream = io.StringIO()
    engine = make_engine("ngram", observers=[Recorder(stream, HEADER)])
    engine.add([0, 549, 300], SamplingParams(max_tokens=4, temperature=0.0).resolve({}))
    run_dry(engine)
    lines = [json.loads(line) for line in stream.getvalue().split("\n") if line]
    assert all(line["own"]["text"] == "" for line in lines if line["type"] == "round")
