"""Law 2, invisibility: greedy and seeded text is plain decoding's with every drafter, however it is batched, cut into chunks and
preempted. Tested on the embedded pair in bfloat16, whose rows are checked to be exact: token for token, without tolerance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from foredraft.drafters import REGISTRY, SELF_DRAFTS, DrafterContext, ScriptedDrafter, build
from foredraft.engine.cache import KVCache
from foredraft.engine.engine import Engine
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import Drafter
from foredraft.engine.region import Region
from foredraft.engine.scheduler import Limits
from foredraft.engine.sequence import TokenSequence
from foredraft.engine.token_tree import TreeShape
from foredraft.errors import ForedraftError
from foredraft.model import EMBEDDED, LanguageModel, Read
from foredraft.policy import FixedPolicy
from foredraft.sampling import SamplingParams
from foredraft.utils.heap import HeapTrimmer
from tests.draft_servers import remote_context
from tests.heads.random_heads import random_head
from tests.methods import all_methods
from tests.scripts import continuations_of

PROMPTS = (
    [0, 549, 300, 11, 12, 300, 11, 12],
    [0, 616, 635, 271, 480],
    [0, *range(500, 540)],
    [0, 9],
)
METHODS = sorted(REGISTRY)
GREEDY = {"temperature": 0.0}
SEEDED = (
    {"temperature": 0.2, "seed": 1},
    {"temperature": 0.8, "seed": 2, "top_p": 0.9},
    {"temperature": 1.0, "seed": 3, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 1.5, "seed": 4, "top_k": 50, "presence_penalty": 0.5, "frequency_penalty": 0.3},
)


def params(max_tokens: int = 32, **settings: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **settings).resolve({})  # type: ignore[arg-type]


@dataclass
class Bench:
    """Makes engines for one pair of models, and caches the texts of plain decoding."""

    target: LanguageModel
    draft: LanguageModel
    self_draft: LanguageModel
    plain_texts: dict[tuple[tuple[int, ...], str], list[int]] = field(default_factory=dict)

    def engine(self, method: str | Drafter, memory: int = 1 << 28, **settings: object) -> Engine:
        pool = MemoryPool(memory)
        draft = self.self_draft if method in SELF_DRAFTS else self.draft
        head = random_head(method, self.target) if isinstance(method, str) else None
        elsewhere = remote_context(str(method), self.target.traits.vocab_size)
        context = DrafterContext(self.target.traits.vocab_size, pool, draft, head=head, **elsewhere)
        drafter = build(method, context) if isinstance(method, str) else method
        return Engine(self.target, drafter, pool, end_ids=[0], seed=0, **settings)  # type: ignore[arg-type]

    def plain(self, prompt: Sequence[int], wanted: SamplingParams, child: int = 0) -> list[int]:
        """The text of a request alone, without drafts, its prompt read in one pass."""
        key = (tuple(prompt), f"{wanted}{child}")
        if key not in self.plain_texts:
            engine = self.engine("none")
            sequence = engine.add(prompt, wanted, child=child)
            run(engine)
            self.plain_texts[key] = sequence.output_ids
        return self.plain_texts[key]


def run(engine: Engine, disturb: Callable[[int], None] = lambda step: None) -> None:
    step = 0
    while engine.has_work:
        disturb(step)
        engine.step()
        step += 1
        assert step < 5000
    assert_idle(engine)


def preempt_at(when: int, engine: Engine, sequence: TokenSequence) -> Callable[[int], None]:
    def disturb(step: int) -> None:
        if step == when:
            engine.preempt(sequence)

    return disturb


def assert_idle(engine: Engine) -> None:
    """Invariant 5: free + used = the pool, drafts included; all used memory is retained."""
    assert engine.pool.used == engine.pool.bytes_retained
    assert engine.cache.bytes_running == 0
    assert engine.pool.available == engine.pool.total
    engine.drop_retained()
    assert engine.pool.free == engine.pool.total


@pytest.fixture(scope="module")
def bench(target: LanguageModel, draft: LanguageModel, int8_target: LanguageModel) -> Bench:
    assert target.traits.row_exact, "this machine's kernels are not row-exact: law 2 holds up to ties only"
    return Bench(target, draft, int8_target)


@pytest.fixture(scope="module")
def int8_bench(int8_target: LanguageModel, int8_draft: LanguageModel) -> Bench:
    assert int8_target.traits.row_exact
    return Bench(int8_target, int8_draft, int8_target)


@pytest.mark.parametrize("method", METHODS)
def test_greedy_and_seeded_text_is_plain_decodings_with_every_drafter(bench: Bench, method: str) -> None:
    assert_invisible(bench, method, 3)


@pytest.mark.parametrize("gamma", [1, 8])
@pytest.mark.parametrize("method", all_methods(REGISTRY))
def test_greedy_and_seeded_text_is_plain_decodings(bench: Bench, method: str, gamma: int) -> None:
    assert_invisible(bench, method, gamma)


@pytest.mark.parametrize("gamma", [2, 8])
@pytest.mark.parametrize("method", all_methods(REGISTRY))
def test_greedy_and_seeded_text_in_int8_is_plain_decodings_in_int8(int8_bench: Bench, method: str, gamma: int) -> None:
    assert_invisible(int8_bench, method, gamma)


def assert_invisible(bench: Bench, method: str, gamma: int) -> None:
    wanted = [params(**GREEDY), *(params(**s) for s in SEEDED)]
    engine = bench.engine(method, speculative_tokens=gamma)
    runs = [(prompt, p, engine.add(prompt, p)) for p in wanted for prompt in PROMPTS]

    def preempt(step: int) -> None:
        if step in (4, 9):
            engine.preempt(next(s for _, _, s in runs if not s.is_finished))

    run(engine, preempt)
    for prompt, p, sequence in runs:
        assert sequence.output_ids == bench.plain(prompt, p), (method, gamma, p)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_text_is_plain_decodings_for_every_draft_length_alone_and_batched(bench: Bench, method: str) -> None:
    wanted = [
        params(24, **s)
        for s in (
            {"temperature": t, "seed": 11, **extra}
            for t in (0.2, 0.7, 1.1, 1.5)
            for extra in ({}, {"top_p": 0.85}, {"min_p": 0.1}, {"repetition_penalty": 1.3})
        )
    ]
    for gamma in range(1, 9):
        engine = bench.engine(method, speculative_tokens=gamma)
        every_other = wanted[gamma % 2 :: 2]
        runs = [(p, child, engine.add(PROMPTS[2], p, child=child)) for p in every_other for child in range(3)]
        run(engine, preempt_at(2, engine, runs[5][2]))
        for p, child, sequence in runs:
            assert sequence.output_ids == bench.plain(PROMPTS[2], p, child)
        alone = bench.engine(method, speculative_tokens=gamma)
        sequence = alone.add(PROMPTS[2], wanted[gamma])
        run(alone, preempt_at(3, alone, sequence))
        assert sequence.output_ids == bench.plain(PROMPTS[2], wanted[gamma])


@pytest.mark.parametrize("rows", [1, 3, 7, 64])
@pytest.mark.parametrize("method", ["none", "draft_model"])
def test_text_does_not_depend_on_how_prompts_are_chunked(bench: Bench, method: str, rows: int) -> None:
    engine = bench.engine(method, limits=Limits(max_batch_tokens=rows))
    wanted = params(16, temperature=0.9, seed=5)
    sequences = [engine.add(prompt, wanted) for prompt in PROMPTS]
    run(engine)
    assert [s.output_ids for s in sequences] == [bench.plain(prompt, wanted) for prompt in PROMPTS]


@pytest.mark.parametrize("method", ["none", "suffix", "draft_model"])
def test_preemption_for_lack_of_memory_changes_no_text(bench: Bench, method: str) -> None:
    prompts = [[0, *range(100 + i, 130 + i)] for i in range(8)]
    wanted = params(80, temperature=0.9, seed=6)
    room = bench.target.traits.bytes_per_token * 64 * 7
    engine = bench.engine(method, memory=room)
    sequences = [engine.add(prompt, wanted) for prompt in prompts]
    run(engine)
    assert sum(s.num_preemptions for s in sequences) > 0
    assert [s.output_ids for s in sequences] == [bench.plain(prompt, wanted) for prompt in prompts]


def test_a_wrong_drafter_changes_no_text_and_a_right_one_saves_steps(bench: Bench) -> None:
    wanted = params(40, **GREEDY)
    right = ScriptedDrafter(continuations_of({0: [*PROMPTS[0], *bench.plain(PROMPTS[0], wanted)]}))
    for drafter in (right, ScriptedDrafter(lambda request: [7] * request.max_len)):
        engine = bench.engine(drafter, speculative_tokens=5)
        sequence = engine.add(PROMPTS[0], wanted)
        run(engine)
        assert sequence.output_ids == bench.plain(PROMPTS[0], wanted)
        if drafter is right:
            assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens
            assert engine.stats.num_steps < 40 / 4


def test_self_draft_is_always_accepted(bench: Bench) -> None:
    """A hole in the draft's cache would not change the text, only the acceptance rate. Sampled too, so that p and q are compared."""
    for settings in (GREEDY, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0}):
        engine = Bench(bench.target, bench.target, bench.target).engine("draft_model")
        for prompt in PROMPTS:
            engine.add(prompt, params(40, **settings))
        run(engine)
        assert engine.stats.num_accepted_tokens == engine.stats.num_evaluated_tokens > 50


def test_requests_of_every_kind_share_a_batch(bench: Bench) -> None:
    engine = bench.engine("draft_model")
    mixed = [
        params(20, **GREEDY),
        params(20, temperature=1.0),
        params(20, temperature=1.0, top_p=0.8, verification="rejection"),
        params(20, temperature=1.0, seed=9),
        params(20, **GREEDY, speculative_tokens=0),
        params(20, **GREEDY, speculative_tokens=7, repetition_penalty=1.5),
        params(20, temperature=0.7, seed=9, min_tokens=20, logit_bias={0: 5.0}),
    ]
    sequences = [engine.add(PROMPTS[1], p) for p in mixed]
    run(engine)
    for p, sequence in zip(mixed, sequences, strict=True):
        if p.seed is not None or p.is_greedy:
            assert sequence.output_ids == bench.plain(PROMPTS[1], p)
    assert sequences[4].stats.num_spec_steps == 0
    assert sequences[6].num_output == 20


def test_the_target_has_read_the_history_up_to_the_pending_token(bench: Bench) -> None:
    """Invariant 1, after every step of a batch that drafts, accepts, rejects and is preempted."""
    engine = bench.engine("draft_model")
    sequences = [engine.add(prompt, params(30, temperature=1.2)) for prompt in PROMPTS]
    step = 0
    while engine.has_work:
        if step == 6:
            engine.preempt(sequences[1])
        for sequence in engine.step():
            if not sequence.is_finished:
                assert engine.cache.region(sequence.seq_id).tokens == sequence.tokens[:-1]
        step += 1


def test_sequences_may_be_added_and_aborted_at_any_step(bench: Bench) -> None:
    engine = bench.engine("draft_model")
    wanted = params(30, temperature=0.8, seed=8)
    first = [engine.add(prompt, wanted) for prompt in PROMPTS]
    for _ in range(4):
        engine.step()
    late = engine.add(PROMPTS[0], wanted)
    engine.abort(first[1])
    engine.abort(first[1])
    engine.step()
    engine.abort(late)
    run(engine)
    assert first[1].finish_reason == "abort"
    assert first[0].output_ids == bench.plain(PROMPTS[0], wanted)
    assert first[2].output_ids == bench.plain(PROMPTS[2], wanted)


@pytest.mark.parametrize("retain", [True, False])
def test_an_engine_has_work_until_all_memory_is_free(bench: Bench, retain: bool) -> None:
    """Other threads wait until it has none, and may then rely on the memory."""
    engine = bench.engine("draft_model", retain=retain)

    class Heap(HeapTrimmer):
        def freed(self, num_bytes: int) -> None:
            had_work.append(engine.has_work)

    had_work: list[bool] = []
    engine.pool.heap = Heap()
    sequences = [engine.add(PROMPTS[0], params(300, **GREEDY)) for _ in range(2)]
    while any(sequence.num_output < 100 for sequence in sequences):
        engine.step()
    had_work.clear()
    for sequence in sequences:
        engine.abort(sequence)
    assert had_work
    assert all(had_work)
    assert_idle(engine)


@pytest.mark.parametrize(("place", "when"), [("read", (2, 5)), ("verify", (2, 4)), ("commit", (2, 3))])
def test_an_interrupt_anywhere_in_a_step_leaves_the_engine_usable(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, place: str, when: tuple[int, int]
) -> None:
    """In the passes of draft and target, with unverified draft tokens in the cache, or between two commits."""
    engine = bench.engine("draft_model")
    wanted = params(20, **GREEDY)
    sequences = [engine.add(prompt, wanted) for prompt in PROMPTS]
    engine.step()
    owner, name = {
        "read": (LanguageModel, "read"),
        "verify": (Engine, "_verify"),
        "commit": (Engine, "_grow"),
    }[place]
    original = getattr(owner, name)
    calls = 0

    def interrupted(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls in when:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)
    interrupts = 0
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 2
    assert [s.output_ids for s in sequences] == [bench.plain(prompt, wanted) for prompt in PROMPTS]
    assert_idle(engine)


def test_a_failing_processor_ends_its_own_request_only(bench: Bench) -> None:
    def raises(prefix: list[int], logits: Tensor) -> Tensor:
        if len(prefix) > 12:
            raise KeyError("boom")
        return logits

    def gives_nan(prefix: list[int], logits: Tensor) -> Tensor:
        return logits * torch.nan

    def overflows(prefix: list[int], logits: Tensor) -> Tensor:
        return logits.double() * 1e300

    engine = bench.engine("draft_model")
    good = engine.add(PROMPTS[0], params(20, **GREEDY))
    bad = engine.add(PROMPTS[0], params(20, **GREEDY, logits_processors=[raises]))
    nan = engine.add(PROMPTS[0], params(20, temperature=1.0, logits_processors=[gives_nan]))
    infinite = engine.add(PROMPTS[0], params(20, temperature=1.0, logits_processors=[overflows]))
    run(engine)
    assert good.output_ids == bench.plain(PROMPTS[0], params(20, **GREEDY))
    assert bad.finish_reason == nan.finish_reason == "error"
    assert "raises raised KeyError" in str(bad.error)
    assert "gives_nan must return numbers" in str(nan.error)
    assert "overflows must return numbers below +inf" in str(infinite.error)
    # at the token where plain decoding would have failed: errors after a rejected draft token are ignored
    assert len(PROMPTS[0]) + bad.num_output == 13
    assert bad.output_ids == bench.plain(PROMPTS[0], params(20, **GREEDY))[: bad.num_output]


def test_errors_after_the_end_of_a_text_are_ignored(bench: Bench) -> None:
    end = bench.plain(PROMPTS[0], params(20, **GREEDY))[3]

    def refuses_what_follows_the_end(prefix: list[int], logits: Tensor) -> Tensor:
        if end in prefix[len(PROMPTS[0]) :]:
            raise AssertionError("the text was over")
        return logits

    wanted = params(20, **GREEDY, stop_token_ids=[end], logits_processors=[refuses_what_follows_the_end])
    text = [*PROMPTS[0], *bench.plain(PROMPTS[0], params(20, **GREEDY))]
    engine = bench.engine(ScriptedDrafter(continuations_of({0: text})), speculative_tokens=8)
    sequence = engine.add(PROMPTS[0], wanted)
    run(engine)
    assert sequence.error is None
    assert sequence.output_ids == text[len(PROMPTS[0]) :][: text[len(PROMPTS[0]) :].index(end) + 1]


def test_end_ids_and_bad_words_beyond_the_logits_are_ignored(bench: Bench) -> None:
    pool = MemoryPool(1 << 28)
    engine = Engine(bench.target, build("none", DrafterContext(4096, pool)), pool, end_ids=[0, 151_645])
    sequence = engine.add(PROMPTS[0], params(6, **GREEDY, min_tokens=3), bad_words=[(7, 151_645)])
    run(engine)
    assert sequence.num_output == 6


def test_a_failed_allocation_returns_its_memory(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = bench.engine("none")
    sequence = engine.add(PROMPTS[0], params(6, **GREEDY))

    def fails(self: Region, capacity: int) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Region, "resize", fails)
        assert engine.step() == [sequence]
    assert sequence.finish_reason == "error"
    assert sequence.error == "MemoryError: no message"
    assert isinstance(sequence.failure, MemoryError)
    assert_idle(engine)
    again = engine.add(PROMPTS[0], params(6, **GREEDY))
    run(engine)
    assert again.num_output == 6


def test_retained_memory_does_not_starve_the_draft(bench: Bench) -> None:
    per_token = bench.target.traits.bytes_per_token + bench.draft.traits.bytes_per_token
    engine = bench.engine("draft_model", memory=per_token * 64 * 5)
    for i in range(8):
        sequence = engine.add([0, *range(100 * i + 5, 100 * i + 15)], params(12, **GREEDY))
        while engine.has_work:
            engine.step()
        assert sequence.stats.num_draft_tokens > 0
    assert_idle(engine)


def test_a_processor_sees_its_own_growing_prefix(bench: Bench) -> None:
    seen: list[tuple[int, ...]] = []

    def watch(prefix: list[int], logits: Tensor) -> Tensor:
        seen.append(tuple(prefix))
        logits[5] += 1.0  # writing to its argument affects nothing else
        return logits.roll(len(prefix) % 3)

    wanted = params(12, **GREEDY, logits_processors=[watch])
    plain = bench.plain(PROMPTS[0], wanted)
    visited = list(seen)
    assert visited == [(*PROMPTS[0], *plain[:i]) for i in range(12)]
    engine = bench.engine("draft_model")
    sequence = engine.add(PROMPTS[0], wanted)
    run(engine)
    assert sequence.output_ids == plain
    assert set(visited) <= set(seen)


def test_logprobs_are_the_raw_target_logprobs_for_every_emitted_token(bench: Bench) -> None:
    wanted = params(24, temperature=0.7, seed=4, logprobs=3, prompt_logprobs=2, repetition_penalty=1.3)
    plain = bench.engine("none")
    expected = plain.add(PROMPTS[2], wanted)
    run(plain)
    engine = bench.engine("draft_model", limits=Limits(max_batch_tokens=16))
    sequence = engine.add(PROMPTS[2], wanted)
    run(engine, preempt_at(1, engine, sequence))
    assert sequence.logprobs == expected.logprobs
    assert sequence.prompt_logprobs == expected.prompt_logprobs
    assert len(expected.logprobs) == expected.num_output
    assert len(expected.prompt_logprobs) == len(PROMPTS[2]) - 1
    reference = reference_logprobs([*PROMPTS[2], *expected.output_ids])
    own = [entry.logprob for entry in [*expected.prompt_logprobs, *expected.logprobs]]
    torch.testing.assert_close(torch.tensor(own), reference, atol=0.15, rtol=0.05)


def test_a_tree_after_the_prompt_does_not_shift_the_prompts_logprobs(bench: Bench) -> None:
    """The draft model drafts in the step that reads the end of the prompt, and the cache holds only a part of its tree."""
    wanted = params(8, **GREEDY, prompt_logprobs=1)
    recorded = []
    for shape in (None, TreeShape((-1, -1, 0, 1))):
        engine = bench.engine("draft_model", policy=FixedPolicy("DraftModelDrafter", shape))
        sequence = engine.add(PROMPTS[2], wanted)
        run(engine)
        assert sequence.stats.num_draft_tokens > 0
        recorded.append(sequence.prompt_logprobs)
    assert recorded[0] == recorded[1]


@torch.inference_mode()
def reference_logprobs(tokens: list[int]) -> Tensor:
    """The logprobs of transformers' own forward pass, in bfloat16; hence the tolerance."""
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED / "target", dtype=torch.bfloat16).eval()
    logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def test_a_finished_prompt_is_not_read_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = bench.engine("none")
    prompt = list(range(200, 300))
    wanted = params(8, **GREEDY)
    first = engine.add(prompt, wanted)
    while engine.has_work:
        engine.step()
    rows = []
    read = LanguageModel.read

    def counted(self: LanguageModel, reads: Sequence[Read], cache: KVCache, *launched: object) -> Tensor:
        rows.append(sum(len(one.tokens) for one in reads))
        return read(self, reads, cache, *launched)

    monkeypatch.setattr(LanguageModel, "read", counted)
    second = engine.add([*first.tokens, 7], wanted)
    fresh = bench.plain([*first.tokens, 7], wanted)
    rows.clear()
    run(engine)
    assert second.output_ids == fresh
    assert max(rows) < 8
    off = bench.engine("none", retain=False)
    off.add(prompt, wanted)
    run(off)


def test_texts_of_one_prompt_share_its_prefill_and_differ(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    read = LanguageModel.read

    def counted(self: LanguageModel, reads: Sequence[Read], cache: KVCache, *launched: object) -> Tensor:
        rows.append(sum(len(one.tokens) for one in reads))
        return read(self, reads, cache, *launched)

    monkeypatch.setattr(LanguageModel, "read", counted)
    engine = bench.engine("none")
    prompt = list(range(200, 300))
    wanted = params(12, temperature=1.0, seed=5, n=3)
    first = engine.add(prompt, wanted)
    others = [engine.add(prompt, wanted, child=child, wait_for=first) for child in (1, 2)]
    run(engine)
    assert sum(r for r in rows if r > 50) == 100
    texts = [s.output_ids for s in (first, *others)]
    assert len({tuple(text) for text in texts}) == 3
    assert texts == [bench.plain(prompt, wanted, child) for child in range(3)]


@pytest.mark.parametrize(
    ("prompt", "settings", "reason"),
    [
        ([], {}, "empty"),
        ([5000], {}, "token id 5000"),
        ([-1], {}, "token id -1"),
        ([1] * 2048, {}, "context holds 2048"),
        ([1], {"logit_bias": {9999: 1.0}}, "logit_bias"),
        ([1], {"stop_token_ids": [9999]}, "stop_token_ids"),
        ([1], {"max_tokens": 500}, "cache_memory"),
    ],
)
def test_requests_that_cannot_run_are_refused_when_added(
    bench: Bench, prompt: list[int], settings: dict[str, object], reason: str
) -> None:
    engine = bench.engine("none", memory=bench.target.traits.bytes_per_token * 128)
    with pytest.raises(ForedraftError, match=reason) as caught:
        engine.add(prompt, params(**{"max_tokens": 4, **settings}))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert not engine.has_work
    good = engine.add([1], params(4, **GREEDY))
    run(engine)
    assert good.num_output == 4


@pytest.mark.parametrize("bad", [lambda r: [99999], lambda r: [1] * (r.max_len + 1)])
def test_a_drafter_that_breaks_the_contract_is_named_and_cools_down(
    bench: Bench, bad: Callable[..., list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    class Dishonest(ScriptedDrafter):
        def propose(self, requests):  # type: ignore[no-untyped-def]
            from foredraft.engine.proposal import Proposal

            return Proposal.certain([bad(r) for r in requests])

    engine = bench.engine(Dishonest(lambda r: []))
    sequence = engine.add(PROMPTS[0], params(4, **GREEDY))
    run(engine)
    assert sequence.output_ids == bench.plain(PROMPTS[0], params(4, **GREEDY))
    (record,) = caplog.records
    assert "drafter Dishonest failed: Dishonest proposed" in record.getMessage()
    assert "not used for the next 32 steps" in record.getMessage()


def test_the_context_is_filled_to_its_last_token(bench: Bench) -> None:
    """The draft model, whose context is no longer, stops in time."""
    engine = bench.engine("draft_model", speculative_tokens=8)
    prompt = [0, *([301, 302, 303, 304] * 505)]
    sequence = engine.add(prompt, params(None, **GREEDY, ignore_eos=True))  # type: ignore[arg-type]
    run(engine)
    assert len(sequence.tokens) == 2048
    assert sequence.finish_reason == "length"


# --- allowed ids, max_tokens=0, and many clients --------------------------------------------------------------------

ALLOWED = (0, *range(300, 340), *range(500, 560))


@pytest.mark.parametrize("method", all_methods(REGISTRY))
def test_only_allowed_ids_are_written_and_no_draft_changes_the_text(bench: Bench, method: str) -> None:
    ways = [GREEDY, *SEEDED, {"temperature": 0.0, "frequency_penalty": -0.5, "min_tokens": 4}]
    engine = bench.engine(method, speculative_tokens=5)
    runs = [
        (prompt, wanted, engine.add(prompt, wanted))
        for wanted in (params(**way, allowed_token_ids=ALLOWED) for way in ways)
        for prompt in PROMPTS
    ]
    free = engine.add(PROMPTS[0], params(**GREEDY))
    run(engine)
    for prompt, wanted, sequence in runs:
        assert set(sequence.output_ids) <= set(ALLOWED)
        assert sequence.output_ids == bench.plain(prompt, wanted), (method, wanted)
    assert free.output_ids == bench.plain(PROMPTS[0], params(**GREEDY))
    assert not set(free.output_ids) <= set(ALLOWED)


def test_an_allowed_id_that_does_not_exist_is_refused(bench: Bench) -> None:
    engine = bench.engine("none")
    with pytest.raises(ForedraftError, match="allowed_token_ids contains token id 99999999"):
        engine.add(PROMPTS[0], params(allowed_token_ids=[1, 99999999]))


@pytest.mark.parametrize("method", all_methods(REGISTRY))
def test_with_max_tokens_0_the_prompt_is_still_read(bench: Bench, method: str) -> None:
    engine = bench.engine(method, limits=Limits(max_batch_tokens=7))
    other = engine.add(PROMPTS[1], params(**GREEDY))
    empty = engine.add(PROMPTS[2], params(0, prompt_logprobs=2, logprobs=0, stop=["x"]))
    one = engine.add(PROMPTS[2], params(1, prompt_logprobs=2, **GREEDY))
    run(engine)
    assert (empty.output_ids, empty.finish_reason, empty.error) == ([], "length", None)
    assert empty.first_token_at is None
    assert len(empty.prompt_logprobs) == len(PROMPTS[2]) - 1
    assert empty.prompt_logprobs == one.prompt_logprobs
    assert other.output_ids == bench.plain(PROMPTS[1], params(**GREEDY))


def test_with_max_tokens_0_the_prompt_is_retained_for_others(bench: Bench) -> None:
    engine = bench.engine("none")
    engine.add(PROMPTS[2], params(0))
    while engine.has_work:
        engine.step()
    sequence = engine.add(PROMPTS[2], params(**GREEDY))
    run(engine)
    assert sequence.num_cached >= len(PROMPTS[2]) - 2
    assert sequence.output_ids == bench.plain(PROMPTS[2], params(**GREEDY))


def test_with_max_tokens_0_a_prompt_may_fill_the_context(bench: Bench) -> None:
    engine = bench.engine("none")
    full = [9] * bench.target.traits.context_len
    with pytest.raises(ForedraftError, match="so that one can be generated"):
        engine.add(full, params(1))
    sequence = engine.add(full, params(0))
    run(engine)
    assert sequence.finish_reason == "length"
    with pytest.raises(ForedraftError, match="the context holds"):
        engine.add([*full, 9], params(0))


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("method", all_methods(REGISTRY))
def test_texts_do_not_depend_on_other_clients(bench: Bench, method: str, retain: bool) -> None:
    """A client with many requests is preempted for the small requests of others."""
    wanted = [params(28, **GREEDY), *(params(28, **way) for way in SEEDED)]
    engine = bench.engine(method, speculative_tokens=3, limits=Limits(4, 32), retain=retain)
    runs = [(prompt, p, engine.add(prompt, p, client="flood")) for p in wanted for prompt in PROMPTS]

    def ask(step: int) -> None:
        if step % 3 == 2 and step < 40:
            p, prompt = wanted[step % len(wanted)], PROMPTS[step % len(PROMPTS)]
            client, priority = f"small {step % 2}", -step
            runs.append((prompt, p, engine.add(prompt, p, client=client, priority=priority)))

    run(engine, ask)
    assert sum(sequence.num_preemptions for _, _, sequence in runs) > 0
    for prompt, p, sequence in runs:
        assert sequence.output_ids == bench.plain(prompt, p), (method, p)
