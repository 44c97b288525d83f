"""The public Python API, on the embedded pair."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft import LLM, ForedraftError, ModelError, RequestError, SamplingParams, VocabularyError
from foredraft.drafters import ScriptedDrafter
from foredraft.engine.cache import KVCache
from foredraft.engine.proposal import DraftRequest, Proposal
from foredraft.model import EMBEDDED, LanguageModel, WarmUpSizes
from foredraft.text.request import Request
from foredraft.text.stream import TextStream
from foredraft.utils.heap import HeapTrimmer
from tests.scripts import continuations_of

CODE = 'def mean(values):\n    """Return the arithmetic mean of values."""'
STORY = "Once upon a time, there was a little"
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(seed=0)


@pytest.fixture(autouse=True)
def _idle(llm: LLM) -> Iterator[None]:
    """Assert after each test that nothing is left in the engine."""
    yield
    assert not llm.engine.has_work
    assert llm.engine.pool.used == llm.engine.pool.bytes_retained


def text(llm: LLM, prompt: object, params: SamplingParams = GREEDY) -> str:
    return llm.generate(prompt, params)[0].outputs[0].text  # type: ignore[arg-type]


def test_no_arguments_load_the_embedded_pair(llm: LLM) -> None:
    (output,) = llm.generate(
        CODE, replace(GREEDY, speculative_tokens=4)
    )  # "auto" may decide that drafting is not worth its time
    assert llm.method == "draft_model"
    assert output.finished
    assert output.prompt == CODE
    assert len(output.outputs[0].token_ids) == 24
    assert llm.tokenizer is not None
    assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)
    speculative = output.metrics.speculative_decoding
    assert speculative.num_spec_steps > 0
    assert sum(speculative.acceptance_histogram) == speculative.num_spec_steps
    accepted = sum(j * n for j, n in enumerate(speculative.acceptance_histogram))
    assert accepted == speculative.num_accepted_draft_tokens
    assert speculative.mean_acceptance_length == pytest.approx(1 + accepted / speculative.num_spec_steps)
    assert speculative.draft_acceptance_rate == pytest.approx(accepted / speculative.num_draft_tokens)
    assert output.metrics.time_to_first_token is not None
    assert output.metrics.tokens_per_second is not None


def test_models_are_warmed_up_for_the_largest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[WarmUpSizes] = []
    monkeypatch.setattr(LanguageModel, "warm_up", lambda model, demand: sizes.append(demand))
    LLM(device="cpu", max_num_seqs=3, speculative_tokens=9, max_speculative_tokens=5, batch_invariant=True)
    assert sizes == [WarmUpSizes(3, 10, 4096, drafts=False), WarmUpSizes(3, 9, 4096, drafts=True)]


def test_a_model_without_a_draft_uses_suffix() -> None:
    assert LLM(EMBEDDED / "target").method == "suffix"


@pytest.mark.parametrize("method", ["none", "ngram", "suffix", "draft_model", "self-int8", "self-int4"])
def test_another_drafter_over_the_same_models_writes_the_same_text(llm: LLM, method: str) -> None:
    other = llm.with_drafter(method, 3)
    assert (other.method, other.speculative_tokens) == (method, 3)
    assert other.target is llm.target
    assert other.tokenizer is llm.tokenizer
    assert other.engine.pool is llm.engine.pool
    assert other.engine is not llm.engine
    assert text(other, CODE) == text(llm, CODE)
    assert (other.engine.stats.num_draft_tokens > 0) == (method != "none")
    other.engine.drop_retained()


def test_another_drafter_loads_nothing_twice(llm: LLM) -> None:
    assert llm.with_drafter("draft_model").draft is llm.draft
    copied = llm.with_drafter("self-int8").draft
    assert copied is not llm.draft
    assert llm.with_drafter("self-int8").draft is copied


def test_with_drafter_keeps_the_drafter_if_none_is_named(llm: LLM) -> None:
    other = llm.with_drafter()
    assert (other.method, other.speculative_tokens) == (llm.method, llm.speculative_tokens)
    assert llm.with_drafter("suffix", 0).with_drafter().method == "suffix"


def test_another_drafter_that_cannot_work_is_refused(llm: LLM) -> None:
    with pytest.raises(ForedraftError, match="unknown method 'oracle'"):
        llm.with_drafter("oracle")
    with pytest.raises(ForedraftError, match="at least 0"):
        llm.with_drafter("suffix", -1)
    with pytest.raises(ForedraftError, match="needs a draft model"):
        LLM(EMBEDDED / "target", method="self-int8").with_drafter("draft_model")


def test_prompts_may_be_text_ids_or_dicts_alone_or_in_a_list(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer(STORY)["input_ids"]
    expected = text(llm, STORY)
    for prompt in (ids, torch.tensor(ids).tolist(), {"prompt": STORY}, {"prompt_token_ids": ids}):
        assert text(llm, prompt) == expected
    outputs = llm.generate([STORY, ids, {"prompt": STORY}], GREEDY)
    assert [output.outputs[0].text for output in outputs] == [expected] * 3
    assert [output.prompt for output in outputs] == [STORY, None, STORY]


def test_outputs_keep_the_order_of_the_prompts_and_their_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, temperature=0.0) for n in (9, 2, 5)]
    outputs = llm.generate([CODE, STORY, CODE], params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [9, 2, 5]
    assert outputs[0].outputs[0].text.startswith(outputs[2].outputs[0].text)
    assert all(o.outputs[0].finish_reason == "length" for o in outputs)


def test_zero_speculative_tokens_is_plain_decoding_with_the_same_text(llm: LLM) -> None:
    plain = SamplingParams(max_tokens=40, temperature=0.9, seed=3, speculative_tokens=0)
    drafted = SamplingParams(max_tokens=40, temperature=0.9, seed=3, speculative_tokens=6)
    a, b = llm.generate([STORY, STORY], [plain, drafted])
    assert a.outputs[0].text == b.outputs[0].text
    assert a.metrics.speculative_decoding.num_spec_steps == 0
    assert a.metrics.speculative_decoding.mean_acceptance_length is None
    assert b.metrics.speculative_decoding.num_spec_steps > 0


def test_n_texts_differ_and_are_reproducible(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=1, n=3)
    first, again = (llm.generate(STORY, params)[0] for _ in range(2))
    texts = [o.text for o in first.outputs]
    assert len(set(texts)) == 3
    assert texts == [o.text for o in again.outputs]
    assert [o.index for o in first.outputs] == [0, 1, 2]


def test_the_engines_seed_makes_unseeded_runs_repeatable() -> None:
    """With a fixed number of draft tokens only: "auto" depends on measured times, and so would the draws."""
    params = SamplingParams(max_tokens=20, temperature=1.0, speculative_tokens=4)
    assert text(LLM(seed=5), STORY, params) == text(LLM(seed=5), STORY, params)
    assert text(LLM(seed=5), STORY, params) != text(LLM(seed=6), STORY, params)


def test_a_stop_string_inside_an_accepted_block_cuts_text_ids_and_counts(llm: LLM) -> None:
    assert llm.tokenizer is not None
    full = llm.generate(STORY, SamplingParams(max_tokens=40, temperature=0.0))[0].outputs[0]
    continuation = [*llm.tokenizer(STORY)["input_ids"], *full.token_ids]
    eager = LLM(EMBEDDED / "target", method=ScriptedDrafter(continuations_of(dict.fromkeys(range(9), continuation))))
    stop = full.text[20:26]
    params = SamplingParams(max_tokens=40, temperature=0.0, stop=[stop], speculative_tokens=8)
    (output,) = eager.generate(STORY, params)
    completion = output.outputs[0]
    assert completion.text == full.text[: full.text.index(stop)]
    assert completion.finish_reason == "stop"
    assert completion.stop_reason == stop
    assert stop in llm.tokenizer.decode(completion.token_ids)
    assert stop not in llm.tokenizer.decode(completion.token_ids[:-1])
    assert completion.token_ids == full.token_ids[: len(completion.token_ids)]
    stats = output.metrics.stats
    assert stats.num_emitted_tokens == len(completion.token_ids) == len(completion.origins)
    assert stats.num_accepted_tokens <= len(completion.token_ids)
    (kept,) = eager.generate(
        STORY, SamplingParams(max_tokens=40, temperature=0.0, stop=[stop], include_stop_str_in_output=True)
    )
    assert kept.outputs[0].text == completion.text + stop


def test_end_of_sequence_ends_the_text_and_ignore_eos_does_not(llm: LLM) -> None:
    end = {0: 100.0}
    stopped = llm.generate(STORY, SamplingParams(max_tokens=5, temperature=0.0, logit_bias=end))[0].outputs[0]
    assert (stopped.finish_reason, stopped.stop_reason, stopped.token_ids) == ("stop", None, [0])
    assert stopped.text == ""
    params = SamplingParams(max_tokens=5, temperature=0.0, logit_bias=end, ignore_eos=True)
    assert llm.generate(STORY, params)[0].outputs[0].token_ids == [0] * 5
    late = llm.generate(STORY, SamplingParams(max_tokens=9, temperature=0.0, logit_bias=end, min_tokens=4))
    assert late[0].outputs[0].token_ids[4:] == [0]
    named = llm.generate(
        STORY, SamplingParams(max_tokens=5, temperature=0.0, logit_bias={7: 100.0}, stop_token_ids=[7])
    )
    assert (named[0].outputs[0].finish_reason, named[0].outputs[0].stop_reason) == ("stop", 7)


@pytest.mark.parametrize("gamma", [0, 4])
def test_a_stop_token_may_be_included_in_the_text(llm: LLM, gamma: int) -> None:
    settings: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, "speculative_tokens": gamma}
    whole = llm.generate(STORY, SamplingParams(**settings))[0].outputs[0]
    stop = whole.token_ids[10]
    end = whole.token_ids.index(stop)
    settings["stop_token_ids"] = [stop]
    without = llm.generate(STORY, SamplingParams(**settings))[0].outputs[0]
    included = llm.generate(STORY, SamplingParams(**settings, include_stop_str_in_output=True))[0].outputs[0]
    assert included.token_ids == without.token_ids == whole.token_ids[: end + 1]
    assert included.stop_reason == without.stop_reason == stop
    assert whole.text.startswith(included.text)
    assert included.text.startswith(without.text)
    assert included.text == without.text + llm.text_tokenizer.decode([stop])


def test_bad_words_never_appear(llm: LLM) -> None:
    plain = text(llm, STORY)
    word = plain.split()[2]
    params = SamplingParams(max_tokens=24, temperature=0.0, bad_words=[word])
    assert word not in text(llm, STORY, params).split()


def test_logprobs_contain_every_token(llm: LLM) -> None:
    (output,) = llm.generate(STORY, SamplingParams(max_tokens=10, temperature=0.0, logprobs=2, prompt_logprobs=0))
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert output.prompt_logprobs is not None
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entry[token].rank == 1  # greedy
        assert len(entry) == 2
        assert entry[token].decoded_token == llm.tokenizer.decode([token])  # type: ignore[union-attr]
    assert completion.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True))
    )
    assert output.prompt_logprobs[0] is None
    assert [next(iter(e)) for e in output.prompt_logprobs[1:] if e] == output.prompt_token_ids[1:]


def test_streamed_deltas_join_to_the_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=2, n=2)
    (expected,) = llm.generate(STORY, params)
    pieces: dict[int, str] = {0: "", 1: ""}
    ids: dict[int, list[int]] = {0: [], 1: []}
    last = None
    for delta in llm.stream(STORY, params):
        pieces[delta.index] += delta.text
        ids[delta.index] += delta.token_ids
        last = delta.output or last
    assert [pieces[0], pieces[1]] == [o.text for o in expected.outputs]
    assert [ids[0], ids[1]] == [o.token_ids for o in expected.outputs]
    assert last is not None
    assert last.outputs[0].text == pieces[0]


def test_a_stream_can_be_closed_early_and_others_go_on(llm: LLM) -> None:
    expected = text(llm, CODE)
    kept = llm.stream(CODE, GREEDY)
    left = llm.stream(STORY, SamplingParams(max_tokens=200, temperature=0.0))
    got = [next(kept).text]
    next(left)
    next(left)
    left.close()  # type: ignore[attr-defined]
    assert text(llm, STORY)  # a batch in between advances the stream as well
    assert "".join([*got, *(delta.text for delta in kept)]) == expected


def test_ctrl_c_leaves_the_engine_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = text(llm, CODE)
    step = llm.engine.step
    calls = iter(range(100))

    def interrupted() -> object:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([STORY, CODE], SamplingParams(max_tokens=100, temperature=0.0))
    assert not llm.engine.has_work
    assert text(llm, CODE) == expected


INTERRUPTED: dict[str, tuple[Any, str]] = {
    "start": (Request, "add_text"),
    "first pass": (LanguageModel, "read"),
    "growth": (HeapTrimmer, "freed"),
    "commit": (TextStream, "__call__"),
    "end": (KVCache, "retain"),
    "eviction": (KVCache, "_unlist"),
}


@pytest.mark.parametrize(("owner", "name"), INTERRUPTED.values(), ids=INTERRUPTED)
def test_ctrl_c_at_any_moment_leaves_no_trace(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, ctrl_c: Callable[[], None]
) -> None:
    """A real signal arrives while the engine changes its state. Later texts, and streams that go on, are those of plain decoding."""
    llm = LLM(method="draft_model", cache_memory=4 << 20)
    expected = text(llm, CODE)
    for prompt in (STORY, CODE):
        llm.generate([prompt, f"{prompt} and"], SamplingParams(max_tokens=150, temperature=0.0, stop="\n\n"))
    other = llm.stream(CODE, GREEDY)
    got = [next(other).text]
    original = getattr(owner, name)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        ctrl_c()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([STORY * 4, CODE], SamplingParams(max_tokens=100, temperature=0.0, stop="\n\n", logprobs=1))
    assert "".join([*got, *(delta.text for delta in other)]) == expected
    assert not llm.engine.has_work
    assert text(llm, CODE) == expected
    llm.engine.drop_retained()
    assert llm.engine.pool.used == 0


def test_a_failed_request_is_raised_after_the_others_are_done(llm: LLM) -> None:
    def broken(prefix: list[int], logits: Tensor) -> Tensor:
        raise ZeroDivisionError("oops")

    params = [GREEDY, SamplingParams(max_tokens=24, temperature=0.0, logits_processors=[broken])]
    with pytest.raises(RequestError, match="broken raised ZeroDivisionError: oops") as caught:
        llm.generate([STORY, CODE], params)
    good, bad = caught.value.outputs
    assert good.outputs[0].text == text(llm, STORY)  # type: ignore[attr-defined]
    assert bad.outputs[0].finish_reason == "error"  # type: ignore[attr-defined]
    with pytest.raises(RequestError, match="broken"):
        list(llm.stream(CODE, params[1]))


@pytest.mark.parametrize("place", ["start", "text", "output"])
def test_an_error_for_one_prompt_does_not_lose_the_others(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The error is raised before the text begins, in its stop rule, or when its output is made."""
    raised = KeyError("injected")

    def of_code(original: Callable[..., Any], is_code: Callable[..., bool]) -> Callable[..., Any]:
        def faulty(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_code(self, *args):
                raise raised
            return original(self, *args, **kwargs)

        return faulty

    owner, name, is_code = {
        "start": (type(llm.frontend), "start", lambda _, request: request.prompt == CODE),
        "text": (
            TextStream,
            "__call__",
            lambda stream, new_ids, before: stream._stop.strings == ("never",) and before >= 3,
        ),
        "output": (Request, "output", lambda request: request.prompt == CODE),
    }[place]
    stop = SamplingParams(max_tokens=24, temperature=0.0, stop="never")
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, of_code(getattr(owner, name), is_code))
        with pytest.raises(RequestError, match=r"^prompt 1: KeyError: 'injected'") as caught:
            llm.generate([STORY, CODE, STORY], [GREEDY, stop, GREEDY])
    assert caught.value.__cause__ is raised
    first, bad, last = caught.value.outputs
    expected = text(llm, STORY)
    assert first.outputs[0].text == last.outputs[0].text == expected  # type: ignore[attr-defined]
    assert [one.finish_reason for one in bad.outputs] == ([] if place == "start" else ["error"])  # type: ignore[attr-defined]
    assert not llm.engine.has_work
    assert llm.engine.pool.used == llm.engine.pool.bytes_retained


def test_a_failing_drafter_is_named_and_counted_and_changes_no_text(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    class Fails:
        def propose(self, requests: list[DraftRequest]) -> Proposal:
            raise ZeroDivisionError

        def forget(self, seq_ids: list[int]) -> None: ...

    other = llm.with_drafter(Fails(), speculative_tokens=3)
    assert text(other, STORY) == text(llm, STORY)
    assert other.fallbacks == {("Fails", "failed"): 1}
    assert other.cooldowns == {"Fails": "failed"}
    assert any("drafter Fails failed: ZeroDivisionError at test_llm.py" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize(
    ("prompts", "params", "reason"),
    [
        ("", None, "empty"),
        ([[]], None, "empty"),
        ([STORY, ""], None, "prompt 1: .*empty"),
        (7, None, "must be text or a list of token ids|must be a string"),
        ([STORY, 7.5], None, "prompt 1"),
        ([[1, "a"]], None, "token ids"),
        ({"text": STORY}, None, '"prompt"'),
        ("word " * 2100, None, "context holds 2048"),
        (STORY, [GREEDY, GREEDY], "one for each"),
        (STORY, {"temperature": 0}, "SamplingParams"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_anything_runs(
    llm: LLM, prompts: object, params: object, reason: str
) -> None:
    with pytest.raises(ForedraftError, match=reason) as caught:
        llm.generate(prompts, params)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"method": "magic"},
            "unknown method 'magic': known methods are dflash, draft_model, eagle, early_exit, medusa, mtp, ngram, none, pard, peagle, remote, "
            "self-int4, self-int8, suffix",
        ),
        ({"model": EMBEDDED / "target", "method": "draft_model"}, "needs a draft model"),
        ({"method": "early_exit"}, "needs a layer: give exit_layer"),
        ({"exit_layer": 0}, "exit_layer must be an integer of at least 1"),
        ({"exit_layer": 8}, "has 8 layers: an early exit must come after 1 to 7 of them"),
        ({"exit_layer": 2, "method": "suffix"}, 'exit_layer is for the method "early_exit"'),
        ({"adapt": True, "method": "suffix"}, 'adapt is for the method medusa, but "suffix" has nothing that adapts'),
        ({"speculative_tokens": -1}, "speculative_tokens"),
        ({"num_threads": 0}, "num_threads"),
        ({"cache_memory": 0}, "cache_memory"),
        ({"model": "/no/such/place"}, "no such directory"),
        ({"dtype": "float12"}, "dtype must be"),
        ({"dtype": 5}, "dtype must be auto, float32, bfloat16, float16, not 5"),
        ({"model": 5}, "model must be a name or a path, or a PreTrainedModel, not 5"),
        ({"draft_model": 5}, "draft_model must be a name or a path, or a PreTrainedModel, not 5"),
        ({"tokenizer": 5}, "tokenizer must be a name or a path, or a PreTrainedTokenizerBase, not 5"),
        ({"config": 5}, "config must be a name or a path, not 5"),
        ({"verification_rules": 5}, "verification_rules must map names to rules, not be int"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be true or false, not 'no'"),
    ],
)
def test_bad_settings_are_refused_in_one_line(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ForedraftError, match=reason) as caught:
        LLM(**settings)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_draft_with_another_vocabulary_is_refused_with_the_difference(tmp_path: Path) -> None:
    for file in (EMBEDDED / "draft").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    a, b = sorted(vocab, key=vocab.__getitem__)[100:102]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(VocabularyError, match=r"token \d+ is"):
        LLM(EMBEDDED / "target", tmp_path, heterogeneous_vocab="none")


def test_without_a_tokenizer_ids_still_work(tmp_path: Path, llm: LLM) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((EMBEDDED / "target" / name).read_bytes())
    bare = LLM(tmp_path)
    ids = llm.tokenizer(STORY)["input_ids"]  # type: ignore[index, misc]
    output = bare.generate([ids], GREEDY)[0].outputs[0]
    assert output.token_ids == llm.generate([ids], GREEDY)[0].outputs[0].token_ids
    with pytest.raises(ForedraftError, match="tokenizer"):
        bare.generate(STORY)
    with pytest.raises(ForedraftError, match="tokenizer"):
        bare.generate([ids], SamplingParams(stop="x"))
    assert LLM(tmp_path, tokenizer=str(EMBEDDED / "target")).generate(STORY, GREEDY)[0].outputs[0].text == text(
        llm, STORY
    )


def test_without_a_chat_template_the_error_says_how_to_give_one(llm: LLM) -> None:
    with pytest.raises(ForedraftError, match="template"):
        llm.chat([{"role": "user", "content": "hello"}])


def test_conversations_use_the_template_and_keep_earlier_turns(llm: LLM) -> None:
    template = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    turns = [{"role": "user", "content": "Tell me a story."}]
    (first,) = llm.chat(turns, GREEDY, chat_template=template)
    assert first.prompt_token_ids[0] == 0
    assert first.prompt_token_ids[1] != 0  # BOS is not doubled
    turns += [{"role": "assistant", "content": first.outputs[0].text}, {"role": "user", "content": "More."}]
    before = llm.engine.stats.num_steps
    both = llm.chat([turns, turns[:1]], GREEDY, chat_template=template)
    assert both[1].outputs[0].text == first.outputs[0].text
    assert llm.engine.stats.num_steps > before


def test_the_checkpoints_own_sampling_defaults_and_ends_are_honoured(tmp_path: Path, llm: LLM) -> None:
    for file in (EMBEDDED / "target").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    end = llm.generate(STORY, GREEDY)[0].outputs[0].token_ids[3]
    config = {"eos_token_id": [0, end], "do_sample": True, "temperature": 0.0, "top_k": 7}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    changed = LLM(tmp_path)
    output = changed.generate(STORY)[0].outputs[0]
    expected = llm.generate(STORY, GREEDY)[0].outputs[0].token_ids
    assert output.token_ids == expected[: expected.index(end) + 1]
    assert output.finish_reason == "stop"


def test_a_missing_shard_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((EMBEDDED / "target" / "config.json").read_bytes())
    with pytest.raises(ModelError):
        LLM(tmp_path)


def test_the_final_message_can_be_continued(llm: LLM) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    talk = [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": "Once upon"}]
    assert llm.tokenizer is not None
    for settings, end in (({}, "Once upon</><a>"), ({"continue_final_message": True}, "<assistant>Once upon")):
        (output,) = llm.chat(talk, GREEDY, chat_template=template, **settings)  # type: ignore[arg-type]
        assert llm.tokenizer.decode(output.prompt_token_ids).endswith(end)
    for messages, more, words in (
        (talk, {"add_generation_prompt": True}, "mutually exclusive"),
        (talk[:1], {}, "to be the assistant's"),
        ([*talk, {"role": "assistant", "content": " "}], {}, "with text"),
        ([*talk, {"role": "assistant", "content": None}], {}, "must be a string"),
    ):
        with pytest.raises(ForedraftError, match=words):
            llm.chat(messages, GREEDY, chat_template=template, continue_final_message=True, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("messages", [None, "Hello", 5])
def test_a_conversation_must_be_a_list(llm: LLM, messages: Any) -> None:
    with pytest.raises(ForedraftError, match="messages must be a list of messages, or a list of conversations, not"):
        llm.chat(messages, GREEDY)


def test_urgent_prompts_start_first_and_no_text_changes() -> None:
    llm = LLM(max_num_seqs=1, seed=0)
    prompts, params = [STORY, CODE, "Another"], SamplingParams(max_tokens=4, temperature=0)
    plain = llm.generate(prompts, params)
    outputs = llm.generate(prompts, params, priority=[3, 2, -1])
    assert [o.outputs[0].text for o in outputs] == [o.outputs[0].text for o in plain]
    waited = [output.metrics.time_in_queue or 0 for output in outputs]
    assert sorted(waited, reverse=True) == waited
    for bad, words in (([1], "one for each of the 3 prompts"), (["a", 1, 2], "priority must be an integer")):
        with pytest.raises(ForedraftError, match=words):
            llm.generate(prompts, params, priority=bad)  # type: ignore[arg-type]


def test_a_prompt_can_be_scored_without_generating(llm: LLM) -> None:
    (scored,) = llm.generate(CODE, SamplingParams(max_tokens=0, prompt_logprobs=1, n=2))
    (written,) = llm.generate(CODE, SamplingParams(max_tokens=2, prompt_logprobs=1))
    assert scored.prompt_logprobs == written.prompt_logprobs
    assert [(o.text, o.token_ids, o.finish_reason) for o in scored.outputs] == [("", [], "length")] * 2
    assert scored.metrics.time_to_first_token is None
    assert scored.metrics.tokens_per_second is None
