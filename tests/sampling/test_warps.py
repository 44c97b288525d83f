"""From logits to probabilities, compared with transformers' own processors and with a dense float64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from foredraft.sampling import Row, Sampler, adjusted, choose, pick, token_probs_of
from foredraft.sampling.token_probs import TokenProbs, joined
from tests.laws import EXACT, FALSE_ALARM, adjusted_row, chi_square, dense_law, prefix_violations, sampler_for

LARGE = 151_936


def random_logits(*shape: int, seed: int = 0, sharpness: float = 3.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return sharpness * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def law_through(logits: Tensor, sampler: Sampler, history: Sequence[int] = (0,)) -> Tensor:
    """The distribution of one row through the production path, over the whole vocabulary."""
    rows = [Row(sampler, history)]
    return token_probs_of(adjusted(logits[None], rows).logits, rows).dense(len(logits))[0]


def assert_same_law(got: Tensor, expected: Tensor, error: float = 1e-12) -> None:
    assert torch.equal(got > 0, expected > 0)
    torch.testing.assert_close(got, expected, rtol=0, atol=error)


# --- against transformers -----------------------------------------------------------------------------------------

WARPS: list[dict[str, Any]] = [
    {"temperature": 0.5},
    {"temperature": 0.6, "top_k": 7},
    {"top_p": 0.8},
    {"top_p": 0.05},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.7},
    {"temperature": 2.0, "min_p": 0.02, "top_k": 30, "top_p": 0.9},
    {"temperature": 0.25, "min_p": 0.3, "top_p": 0.5},
]


@pytest.mark.parametrize("params", WARPS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_warps_are_those_of_transformers_applied_in_our_order(params: dict[str, Any], seed: int) -> None:
    """Each warp gives the library's result; the order is temperature, min-p, top-k, top-p."""
    logits = random_logits(300, seed=seed)
    warpers = LogitsProcessorList()
    if "temperature" in params:
        warpers.append(TemperatureLogitsWarper(params["temperature"]))
    if "min_p" in params:
        warpers.append(MinPLogitsWarper(params["min_p"]))
    if "top_k" in params:
        warpers.append(TopKLogitsWarper(params["top_k"]))
    if "top_p" in params:
        warpers.append(TopPLogitsWarper(params["top_p"]))
    expected = torch.softmax(warpers(torch.tensor([[0]]), logits[None].clone()), dim=-1)[0]
    assert_same_law(law_through(logits, sampler_for(params)), expected)
    assert_same_law(law_through(logits, sampler_for(params)), dense_law(logits, **params))


def test_warps_are_applied_in_the_right_order() -> None:
    """top-p applies to what top-k or min-p has left: other orders would keep other ids."""
    law = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    # after top-k 2 the probabilities are 4/7 and 3/7, and top-p .55 keeps one id; top-p first would keep two
    assert (law_through(law.log(), sampler_for({"top_k": 2, "top_p": 0.55})) > 0).tolist() == [
        True,
        False,
        False,
        False,
    ]
    # min-p .6 leaves .4 and .3
    assert (law_through(law.log(), sampler_for({"min_p": 0.6, "top_p": 0.55})) > 0).tolist() == [
        True,
        False,
        False,
        False,
    ]
    # temperature comes before min-p: after flattening, all four are at least .6 of the best
    kept = law_through(law.log(), sampler_for({"temperature": 3.0, "min_p": 0.6})) > 0
    assert kept.tolist() == [True, True, True, True]


def test_temperature_is_exact_in_float64() -> None:
    logits = random_logits(50)
    for temperature in (0.1, 0.6, 0.7, 1.3, 3.7):
        expected = torch.softmax(logits / temperature, dim=0)
        assert_same_law(law_through(logits, sampler_for({"temperature": temperature})), expected)


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits, prompt, output = random_logits(40), [3, 3, 7, 9], [11, 3, 20, 20]
    sampler = sampler_for({"repetition_penalty": penalty}, prompt=prompt)
    ids = torch.tensor([prompt + output])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits[None].clone())[0]
    torch.testing.assert_close(adjusted_row(sampler, logits, prompt + output, []), expected, rtol=0, atol=EXACT)
    torch.testing.assert_close(
        adjusted_row(sampler, logits, prompt + output[:1], output[1:]), expected, rtol=0, atol=EXACT
    )


def test_bad_words_are_those_of_transformers() -> None:
    """Only in the output. (The library also matches a word that began in the prompt; we and vLLM do not.)"""
    words = [[5], [11, 3], [20, 20, 8], [20, 9]]
    logits, prompt = random_logits(40), [1, 2]
    processor = NoBadWordsLogitsProcessor(words, eos_token_id=[39])
    sampler = sampler_for({}, prompt=prompt, bad_words=words)
    for output in ([11], [11, 3], [20], [20, 20], [20, 20, 8], [3, 11], [8, 20, 20]):
        expected = processor(torch.tensor([prompt + output]), logits[None].clone())[0]
        for split in range(len(output) + 1):
            got = adjusted_row(sampler, logits, prompt + output[:split], output[split:])
            assert torch.equal(got, expected), (output, split)


def test_min_tokens_is_that_of_transformers() -> None:
    logits, prompt = random_logits(40), [1, 2]
    processor = MinNewTokensLengthLogitsProcessor(len(prompt), 3, [4, 6])
    sampler = sampler_for({"min_tokens": 3}, prompt=prompt, end_ids=[4, 6])
    for output in ([], [7], [7, 8], [7, 8, 9], [7, 8, 9, 10]):
        expected = processor(torch.tensor([prompt + output]), logits[None].clone())[0]
        for split in range(len(output) + 1):
            assert torch.equal(adjusted_row(sampler, logits, prompt + output[:split], output[split:]), expected)


# --- against formulas ---------------------------------------------------------------------------------------------


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    logits, prompt, output = random_logits(12), [1, 1, 5], [2, 2, 2, 5, 7]
    sampler = sampler_for({"presence_penalty": 0.7, "frequency_penalty": -0.25}, prompt=prompt)
    expected = logits.clone()
    for token in set(output):
        expected[token] -= 0.7 - 0.25 * output.count(token)
    for split in range(len(output) + 1):
        got = adjusted_row(sampler, logits, prompt + output[:split], output[split:])
        torch.testing.assert_close(got, expected, rtol=0, atol=EXACT)


def test_logit_bias_is_added_after_the_penalties() -> None:
    logits, prompt = random_logits(6), [2]
    sampler = sampler_for({"logit_bias": {2: 1.5, 4: -torch.inf, 5: 100}, "repetition_penalty": 2.0}, prompt=prompt)
    expected = logits.clone()
    expected[2] = expected[2] / 2 if expected[2] > 0 else expected[2] * 2
    expected += torch.tensor([0, 0, 1.5, 0, -torch.inf, 100], dtype=torch.float64)
    torch.testing.assert_close(adjusted_row(sampler, logits, prompt, []), expected, rtol=0, atol=EXACT)


def test_only_allowed_ids_remain_and_keep_their_logits() -> None:
    logits, prompt = random_logits(6), [2]
    settings = {"allowed_token_ids": [4, 2, 2], "logit_bias": {4: 1.5, 5: 100}, "frequency_penalty": 0.5}
    sampler = sampler_for(settings, prompt=prompt)
    expected = torch.full_like(logits, -torch.inf)
    expected[2], expected[4] = logits[2], logits[4] + 1.5 - 0.5
    for history, drafted in (([2], [4]), ([2, 4], [])):
        torch.testing.assert_close(adjusted_row(sampler, logits, history, drafted), expected, rtol=0, atol=EXACT)


def test_a_mask_that_leaves_no_id_fails_its_row() -> None:
    sampler = sampler_for({"allowed_token_ids": [3], "min_tokens": 2}, prompt=[1], end_ids=[3])
    _, failed = adjusted(random_logits(1, 6), [Row(sampler, [1])])
    assert failed == {0: "nothing is left to sample after bias, bad words and masks"}


def test_processors_see_the_rows_own_prefix_and_run_in_order_after_the_penalties() -> None:
    seen: list[list[int]] = []

    def first(prefix: list[int], logits: Tensor) -> Tensor:
        seen.append(list(prefix))
        prefix.append(99)  # it modifies its arguments, which are copies
        logits += 1
        return logits * 2

    def second(prefix: list[int], logits: Tensor) -> Tensor:
        assert prefix == seen[-1]
        return logits - 3

    logits = random_logits(6)
    sampler = sampler_for({"logits_processors": [first, second], "logit_bias": {0: 5.0}}, prompt=[1, 2])
    before, history = logits.clone(), [1, 2, 3]
    got = adjusted_row(sampler, logits, history, [4, 5])
    expected = (before + 1) * 2 - 3
    expected[0] += 5
    assert torch.equal(logits, before)
    assert history == [1, 2, 3]
    assert seen == [[1, 2, 3, 4, 5]]
    torch.testing.assert_close(got, expected, rtol=0, atol=EXACT)


@pytest.mark.parametrize(
    "bad",
    [
        lambda prefix, logits: logits[:-1],
        lambda prefix, logits: None,
        lambda prefix, logits: logits * torch.nan,
        lambda prefix, logits: torch.full_like(logits, -torch.inf),
        lambda prefix, logits: 1 / 0,
    ],
)
def test_a_failing_processor_is_named_in_the_error_of_its_row(bad: Any) -> None:
    sampler = sampler_for({"logits_processors": [bad]}, prompt=[1, 2])
    other = sampler_for({"logit_bias": {0: 1.0}})
    _, failed = adjusted(random_logits(2, 6), [Row(other, [1]), Row(sampler, [1, 2, 3], [4])])
    assert list(failed) == [1]
    assert "logits processor" in failed[1]
    assert "\n" not in failed[1]


@given(
    values=st.lists(st.integers(-3, 3), min_size=1, max_size=12),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([1e-9, 0.1, 0.4, 0.65, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
)
@settings(max_examples=300, deadline=None)
def test_truncation_with_ties(values: list[int], top_k: int, top_p: float, min_p: float, temperature: float) -> None:
    """Small integers give ties at every border of truncation."""
    logits = torch.tensor(values, dtype=torch.float64)
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    got = law_through(logits, sampler_for(params))
    torch.testing.assert_close(got, dense_law(logits, **params), rtol=0, atol=1e-12)
    assert float(got.sum()) == pytest.approx(1, abs=EXACT)


def test_truncation_that_keeps_thousands_of_ids() -> None:
    """Flat distributions keep thousands of ids, with the tie at the border beyond the width of the first search."""
    flat = torch.zeros(5000, dtype=torch.float64)
    assert int((law_through(flat, sampler_for({"top_k": 10})) > 0).sum()) == 5000  # all are equal to the tenth
    assert int((law_through(flat, sampler_for({"top_p": 0.5})) > 0).sum()) == 2500
    assert int((law_through(flat, sampler_for({"min_p": 1.0})) > 0).sum()) == 5000
    slope = torch.linspace(0, -1, 5000, dtype=torch.float64)
    for params in ({"top_k": 3000}, {"top_p": 0.7}, {"min_p": 0.5}, {"top_k": 4000, "top_p": 0.99, "min_p": 0.4}):
        assert_same_law(law_through(slope, sampler_for(params)), dense_law(slope, **params), 1e-10)


def test_top_k_beyond_the_vocabulary_and_a_tiny_top_p() -> None:
    logits = random_logits(9)
    whole = torch.softmax(logits, dim=0)
    for top_k in (0, -1, 9, 10, 10**9):
        assert_same_law(law_through(logits, sampler_for({"top_k": top_k})), whole)
    for params in ({"top_p": 1e-12}, {"top_k": 1}, {"min_p": 1.0}):
        law = law_through(logits, sampler_for(params))
        assert law[logits.argmax()] == 1
        assert law.sum() == 1


def test_a_vocabulary_of_one_id() -> None:
    for params in ({}, {"top_k": 3}, {"top_p": 0.1}, {"temperature": 0.0}, {"seed": 3}):
        assert choose(torch.zeros(1, 1), [Row(sampler_for(params), (0,))], margins=True).ids == [0]


# --- rows and the draw --------------------------------------------------------------------------------------------

TRUNCATIONS: list[dict[str, Any]] = [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.01, "top_p": 0.95}]


@pytest.mark.parametrize("params", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("vocab_size", [100, LARGE])
def test_a_rows_distribution_is_bit_identical_in_any_batch(params: dict[str, Any], vocab_size: int) -> None:
    """With sharp and flat rows in one batch: a flat row widens only its own search."""
    logits = torch.stack(
        [random_logits(vocab_size, seed=i, sharpness=s, dtype=torch.float32) for i, s in enumerate((0.1, 5, 1, 3, 0.5))]
    )
    rows = [Row(sampler_for({**params, "temperature": 0.8, "seed": i}), (0,)) for i in range(5)]
    together = token_probs_of(logits, rows).dense(vocab_size)
    ids, _ = pick(token_probs_of(logits, rows), rows)
    for part in ([0], [1], [4], [2, 1], [3, 4, 0]):
        part_rows = [rows[i] for i in part]
        laws = token_probs_of(logits[part], part_rows)
        assert torch.equal(laws.dense(vocab_size), together[part])
        assert torch.equal(pick(laws, part_rows)[0], ids[part])
    torch.testing.assert_close(together.double().sum(1), torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-4)


def test_rows_of_one_batch_keep_their_own_parameters() -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 1},
        {"seed": 1, "top_k": 3},
        {"seed": 2, "temperature": 0.3, "repetition_penalty": 1.5},
        {"temperature": 0.0, "logit_bias": {0: 50.0}},
        {"seed": 9, "top_p": 0.5, "min_p": 0.1},
    ]
    logits = random_logits(len(kinds), 30, dtype=torch.float32)
    together = choose(logits, [Row(sampler_for(k, prompt=[1, 2]), [1, 2, 3]) for k in kinds], margins=True)
    for r, kind in enumerate(kinds):
        alone = choose(logits[r : r + 1], [Row(sampler_for(kind, prompt=[1, 2]), [1, 2, 3])], margins=True)
        assert alone.ids[0] == together.ids[r]
        assert alone.margins is not None
        assert together.margins is not None
        assert alone.margins[0] == together.margins[r]


def test_choosing_does_not_write_to_the_logits() -> None:
    logits = random_logits(2, 20, dtype=torch.float32)
    before = logits.clone()
    rows = [Row(sampler_for({"logit_bias": {1: 3.0}, "seed": 1, "top_k": 2}), (0,)), Row(sampler_for({}), (0,))]
    choose(logits, rows)
    assert torch.equal(logits, before)


def test_softmax_of_low_precision_logits_is_at_least_float32() -> None:
    """float16 rounds such small probabilities to 0, and q = 0 for a drawn token would break the ratio p/q."""
    logits = torch.tensor([[0.0, -20.0, -18.0]])
    for dtype in (torch.bfloat16, torch.float16):
        law = token_probs_of(logits.to(dtype), [Row(sampler_for({}), (0,))]).dense(3)
        assert law.dtype == torch.float32
        torch.testing.assert_close(law, torch.softmax(logits, -1), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "params", [{}, {"seed": 1}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5, "seed": 3}], ids=str
)
def test_a_row_of_nan_is_reported_and_does_not_affect_others(params: dict[str, Any]) -> None:
    logits = random_logits(3, 12, dtype=torch.float32)
    logits[1] = torch.nan
    samplers = [sampler_for(params, prompt=[1, 2]) for _ in range(3)]
    choice = choose(logits, [Row(s, [1, 2, 3], [4]) for s in samplers])
    assert list(choice.failed) == [1]
    assert "NaN" in choice.failed[1]
    assert all(0 <= token < 12 for token in choice.ids)


def test_a_single_nan_is_reported_too() -> None:
    for params in ({}, {"seed": 1}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}):
        logits = random_logits(1, 12, dtype=torch.float32)
        logits[0, 7] = torch.nan
        choice = choose(logits, [Row(sampler_for(params), (0,))])
        assert list(choice.failed) == [0], params


@pytest.mark.parametrize("params", [{}, {"seed": 1}, {"top_k": 3}, {"top_p": 0.6}, {"seed": 2, "min_p": 0.2}], ids=str)
def test_an_id_of_probability_zero_is_never_picked(params: dict[str, Any]) -> None:
    """Neither masked nor truncated ids, nor the padding of rows that keep fewer ids."""
    num = 400
    logits = random_logits(num, 12, dtype=torch.float32)
    logits[:, [0, 5, 11]] = -torch.inf
    logits[::2] *= 4
    rows = [Row(sampler_for({**params, **({"seed": i} if "seed" in params else {})}), (0,)) for i in range(num)]
    laws = token_probs_of(logits, rows)
    ids, _ = pick(laws, rows)
    assert bool((laws.at(torch.arange(num), ids[:, None]) > 0).all())
    assert not set(ids.tolist()) & {0, 5, 11}


def test_an_unseeded_pick_has_the_given_distribution() -> None:
    law = dense_law(random_logits(8, sharpness=1.0), top_k=6)
    rows = [Row(sampler_for({"top_k": 6}, seed=3), (0,))] * 20_000
    ids, _ = pick(token_probs_of(law.log().expand(20_000, -1), rows), rows)
    assert chi_square(torch.bincount(ids, minlength=8), law * 20_000) > FALSE_ALARM


def test_truncated_and_dense_token_probs_agree() -> None:
    kept = torch.tensor([[4, 0], [2, 0]])
    laws = TokenProbs(torch.tensor([[0.7, 0.3], [1.0, 0.0]]), kept)
    dense = laws.dense(5)
    torch.testing.assert_close(dense, torch.tensor([[0.3, 0, 0, 0, 0.7], [0, 0, 1.0, 0, 0]]))
    for ids in ([4, 2], [0, 0], [1, 3]):
        token_ids = torch.tensor(ids)
        assert torch.equal(laws.at(torch.arange(2), token_ids[:, None])[:, 0], dense[torch.arange(2), token_ids])
    rows, columns = torch.tensor([[1, 0, 1]]), torch.tensor([[[0, 1], [4, 0], [3, 2]]])
    assert torch.equal(laws.at(rows, columns), TokenProbs(dense).at(rows, columns))
    assert laws.id_at(torch.tensor([1, 0])).tolist() == [0, 2]
    wide = TokenProbs(torch.softmax(random_logits(3, 5), dim=-1).to(laws.probs.dtype))
    for parts in ([laws], [wide, wide], [laws, wide], [wide, laws, laws]):
        assert torch.equal(joined(parts).dense(5), torch.cat([part.dense(5) for part in parts]))


# --- prefixes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 1.1},
        {"frequency_penalty": 0.4, "repetition_penalty": 0.8},
        {"min_tokens": 3},
        {"allowed_token_ids": [1, 2, 4], "frequency_penalty": 0.3},
        {"logits_processors": [lambda prefix, logits: logits.roll(sum(prefix))]},
    ],
    ids=["repetition", "presence", "frequency", "min_tokens", "allowed", "processor"],
)
def test_a_row_depends_only_on_its_prefix(params: dict[str, Any]) -> None:
    """However the prefix is split into history and draft, and in whatever order it grows and rewinds."""
    assert prefix_violations(params, end_ids=[3], bad_words=[(5, 7), (6,)]) == 0


@given(
    prompt=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    rounds=st.lists(
        st.tuples(st.lists(st.integers(0, 5), max_size=4), st.lists(st.integers(0, 5), max_size=3)), max_size=6
    ),
)
@settings(max_examples=100, deadline=None)
def test_counts_are_those_of_the_prefix(prompt: list[int], rounds: list[tuple[list[int], list[int]]]) -> None:
    """While drafts change and the history grows, compared with counting from scratch."""
    params = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    sampler, history = sampler_for(params, prompt=prompt), list(prompt)
    logits = random_logits(6)
    for draft, committed in rounds:
        for n in range(len(draft) + 1):
            output = history[len(prompt) :] + draft[:n]
            expected = logits.clone()
            for token in {*prompt, *output}:
                expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
            for token in set(output):
                expected[token] -= 0.5 + 0.25 * output.count(token)
            torch.testing.assert_close(adjusted_row(sampler, logits, history, draft[:n]), expected, rtol=0, atol=EXACT)
        history += committed
