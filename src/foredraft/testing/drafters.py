"""The contract of a drafter: what the engine relies on (law 4), and that it does not change any text (law 2). For the laws see
docs/internals/exactness.md."""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from foredraft.engine.contract import check_proposal as check_answer
from foredraft.engine.proposal import CERTAIN, Drafter, DraftRequest, Proposal
from foredraft.engine.token_tree import ROOT, TreeShape
from foredraft.errors import DrafterError
from foredraft.llm import LLM
from foredraft.sampling import SamplingParams
from foredraft.testing.memory import held_bytes
from foredraft.testing.requests import batches, histories, request_for, requests_for, with_features
from foredraft.testing.statistics import FALSE_ALARM, chi_square
from foredraft.testing.suite import name_of, run_suite

MakeDrafter = Callable[[int], Drafter]
_SAMPLED: dict[str, Any] = {"temperature": 0.9}
_KINDS: tuple[dict[str, Any], ...] = (
    {},
    _SAMPLED,
    {"temperature": 0.9, "seed": 7},
    {"temperature": 0.8, "top_p": 0.8},
    {"temperature": 1.1, "top_k": 3, "repetition_penalty": 1.2},
)
_SHAPES = (TreeShape((ROOT, ROOT, 0, 0, 1, 2)), TreeShape((ROOT, 0, 1)))
_NUM_DRAWS, _NUM_CELLS = 400, 10
_VISIBLE: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 0.9, "seed": 3, "top_p": 0.9})
_PROMPTS = ("def count_words(text):", "Once upon a time", "def area(width, height):\n    return")


def check_drafter(
    make_drafter: MakeDrafter, *, vocab_size: int = 16, remembers: bool = False, invisible: bool = True
) -> None:
    """Run DrafterContract without pytest. make_drafter: called with a vocab_size, returns a new drafter.

    vocab_size, remembers: see DrafterContract. invisible: also generate texts with the embedded models (vocabulary of 4096).
    Raises AssertionError with all broken clauses, and DrafterError if make_drafter cannot be called so.
    """
    _check_signature(make_drafter, vocab_size)

    class Contract(DrafterContract):
        def make_drafter(self, vocab_size: int) -> Drafter:
            return make_drafter(vocab_size)

    contract = Contract()
    contract.vocab_size, contract.remembers, contract.invisible = vocab_size, remembers, invisible
    run_suite(contract, name_of(make_drafter(vocab_size)))


def _check_signature(make_drafter: object, vocab_size: int) -> None:
    try:
        inspect.signature(make_drafter).bind(vocab_size)  # type: ignore[arg-type]  # a drafter, if it is given by mistake
    except TypeError:
        raise DrafterError(
            "make_drafter must take a vocab_size and return a new drafter: "
            f"give lambda vocab_size: {name_of(make_drafter)}(...)"
        ) from None
    except ValueError:
        pass  # a function in C need not have a signature


class DrafterContract:
    """Subclass it and return a new drafter from `make_drafter`, and pytest tests it:

        class TestMine(DrafterContract):
            def make_drafter(self, vocab_size):
                return MyDrafter(vocab_size)

    vocab_size: of the small requests. remembers: the drafter keeps what it learned after `forget`, so drafts depend on earlier texts.
    invisible: whether to generate texts with the embedded models too; make_drafter is then called with their vocab_size.
    feature_size: the width of the features that the drafter reads, over all its taps; 0: none.
    """

    vocab_size = 16
    feature_size = 0
    remembers = False
    invisible = True

    def make_drafter(self, vocab_size: int) -> Drafter:
        raise NotImplementedError("return a new drafter for ids below vocab_size")

    # --- law 4 ----------------------------------------------------------------------------------------------------

    def test_it_has_both_methods(self) -> None:
        drafter = self._new()
        for method in ("propose", "forget"):
            assert callable(getattr(drafter, method, None)), f"{name_of(drafter)} has no method {method!r}"

    def test_every_answer_is_legal_and_the_history_stays_as_it_was(self) -> None:
        for params in _KINDS:
            for batch in batches(20, 1, self.vocab_size):
                requests = requests_for(batch, **params)
                self._ask(self._new(), requests)
                for request, (tokens, _) in zip(requests, batch, strict=True):
                    assert list(request.tokens) == tokens, f"the history {tokens} was changed to {list(request.tokens)}"

    def test_a_history_need_not_be_a_list(self) -> None:
        tokens = [1, 2, 3, 1, 2, 3, 1, 2]
        found = [_rows(self._ask(self._new(), [request_for(0, kind, 4)])) for kind in (tuple(tokens), tokens)]
        assert found[0] == found[1], f"a tuple as history gives {found[0]}, but a list gives {found[1]}"

    def test_asking_twice_gives_the_same_certain_answer_twice(self) -> None:
        for params in ({}, {"temperature": 0.9, "seed": 7}):
            for batch in batches(30, 2, self.vocab_size):
                drafter, requests = self._new(), requests_for(batch, **params)
                first, second = (_rows(self._ask(drafter, requests)) for _ in range(2))
                assert first == second, (
                    f"the same requests are answered with {first}, but with {second} when asked again"
                )

    def test_the_order_of_the_batch_does_not_matter(self) -> None:
        for batch in batches(30, 3, self.vocab_size):
            forward, backward = self._new(), self._new()
            for share in (0.5, 1.0):  # a second call, for drafters that learn
                requests = requests_for([(tokens[: max(1, int(share * len(tokens)))], most) for tokens, most in batch])
                there = _rows(self._ask(forward, requests))
                back = _rows(self._ask(backward, requests[::-1]))[::-1]
                assert there == back, f"a batch is answered with {there}, but in reverse order with {back}"

    def test_a_row_does_not_depend_on_its_company(self) -> None:
        for batch in batches(30, 4, self.vocab_size):
            requests = requests_for(batch)
            together = _rows(self._ask(self._new(), requests))
            alone = [_rows(self._ask(self._new(), [request]))[0] for request in requests]
            if not self.remembers:
                assert together == alone, f"requests are answered with {together} together, but with {alone} one by one"

    def test_no_room_means_no_draft(self) -> None:
        for params in _KINDS:
            self._ask(self._new(), [request_for(0, [1, 1, 1, 1], 0, **params), request_for(1, [2], 0, **params)])

    def test_a_tree_where_one_is_wanted(self) -> None:
        """If the drafter grows trees, siblings differ and all tokens of a tree are certain."""
        if not getattr(self._new(), "grows_trees", False):
            return
        for params in _KINDS:
            for shape in _SHAPES:
                for batch in batches(10, 10, self.vocab_size):
                    drafter = self._new()
                    requests = [replace(request, shape=shape) for request in requests_for(batch, **params)]
                    check_answer(drafter, self._ask(drafter, requests), requests, self.vocab_size)

    def test_nobody_asks(self) -> None:
        self._ask(self._new(), [])

    def test_rejected_drafts_are_survived(self) -> None:
        """Histories continue with other tokens than the drafted ones, by one or several at a time."""
        for seed, history in enumerate(histories(20, 5, self.vocab_size)):
            grown, steps = self._new(), range(1, len(history) + 1, 1 + seed % 4)
            tokens: list[int] = []  # one growing list, as the engine keeps it
            for end in steps:
                tokens.extend(history[len(tokens) : end])
                self._ask(grown, [request_for(0, tokens, 3)])

    def test_sequences_join_and_leave_between_calls(self) -> None:
        drafter = self._new()
        tokens = {seq_id: [seq_id, 1, 2, seq_id, 1] for seq_id in range(5)}
        for members in ([0, 1], [1, 2, 0], [3], [], [4, 0, 3], [2]):
            self._ask(drafter, [request_for(seq_id, tokens[seq_id], 4) for seq_id in members])
            for seq_id in members:
                tokens[seq_id] += [2, seq_id]
            drafter.forget([seq_id for seq_id in members if seq_id == 1])

    def test_a_forgotten_sequence_may_start_again_with_another_history(self) -> None:
        pairs = zip(histories(30, 6, self.vocab_size), histories(30, 7, self.vocab_size), strict=True)
        for first, second in pairs:
            drafter = self._new()
            self._ask(drafter, [request_for(7, first, 4)])
            drafter.forget([7])
            again = _rows(self._ask(drafter, [request_for(7, second, 4)]))
            fresh = _rows(self._ask(self._new(), [request_for(7, second, 4)]))
            if not self.remembers:
                assert again == fresh, (
                    f"after forget, {second} is answered with {again}, but by a new drafter with {fresh}"
                )

    def test_an_unknown_sequence_can_be_forgotten(self) -> None:
        drafter = self._new()
        drafter.forget([3, 4])
        drafter.forget([])

    def test_forget_gives_back_what_was_held(self) -> None:
        drafter = self._new()
        self._come_and_go(drafter, range(100))  # let it make its one-time allocations
        before = held_bytes(drafter)
        self._come_and_go(drafter, range(100, 400))
        grown = (held_bytes(drafter) - before) / 300
        assert grown < 24, f"every forgotten sequence leaves about {grown:.0f} bytes behind"
        held = getattr(drafter, "bytes_held", 0)
        assert not held or self.remembers, f"bytes_held is {held} after all sequences were forgotten"

    # --- draws ----------------------------------------------------------------------------------------------------

    def test_a_certain_token_is_not_random(self) -> None:
        said: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for proposal in self._draws():
            (row,), (named,) = _rows(proposal), proposal.prob_rows.tolist()
            for i, token in enumerate(row):
                if named[i] == CERTAIN:
                    said[tuple(row[:i])][token] += 1
        for prefix, tokens in said.items():
            assert len(tokens) == 1, (
                f"after the draft {list(prefix)} it calls {len(tokens)} different tokens certain ({dict(tokens)}): name the "
                "distribution they were drawn from"
            )

    def test_drawn_ids_come_from_the_law_they_name(self) -> None:
        """The randomised CDF of the named distribution at each drawn id must be uniform, for three orders of the ids. Counted by
        position in the draft."""
        places: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
        noise = torch.Generator().manual_seed(1)
        for proposal in self._draws():
            (row,), (named,) = _rows(proposal), proposal.prob_rows.tolist()
            for i, token in enumerate(row):
                if named[i] != CERTAIN:
                    laws = proposal.token_probs
                    assert laws is not None
                    law = laws.after(named[i]).dense(self.vocab_size)[0].double()
                    for name, order in _orders(law).items():
                        at = int((order == token).nonzero())
                        below, own = float(law[order[:at]].sum()), float(law[token])
                        places[i, name].append(below + own * float(torch.rand((), generator=noise)))
        for (i, name), found in places.items():
            cells = (torch.tensor(found) * _NUM_CELLS).long().clamp(0, _NUM_CELLS - 1)
            counts = torch.bincount(cells, minlength=_NUM_CELLS)
            odds = chi_square(counts, torch.full((_NUM_CELLS,), len(found) / _NUM_CELLS))
            assert odds > FALSE_ALARM, (
                f"draft token {i + 1} is not drawn from the distribution it names: sorted by {name}, the tenths of the "
                f"distribution are hit {counts.tolist()} times in {len(found)} draws (p-value {odds:.1g})"
            )

    # --- law 2 ----------------------------------------------------------------------------------------------------

    def test_nobody_can_see_who_drafted(self) -> None:
        """Compare greedy and seeded texts of the embedded models with this drafter and without drafts."""
        if not self.invisible:
            return
        plain = LLM(method="none", device="cpu")
        drafter = self.make_drafter(plain.target.traits.vocab_size)
        drafted = plain.with_drafter(drafter, 3)
        for params in _VISIBLE:
            sampling = SamplingParams(max_tokens=24, **params)
            for prompt in _PROMPTS:
                expected, got = (llm.generate(prompt, sampling)[0] for llm in (plain, drafted))
                near = (
                    got.metrics.speculative_decoding.num_near_ties + expected.metrics.speculative_decoding.num_near_ties
                )
                if plain.target.traits.row_exact or not near:
                    assert got.outputs[0].token_ids == expected.outputs[0].token_ids, (
                        f"with {params}, {prompt!r} is continued by {got.outputs[0].text!r}, but without drafts by "
                        f"{expected.outputs[0].text!r}"
                    )

    # --- helpers --------------------------------------------------------------------------------------------------

    def _new(self) -> Drafter:
        return self.make_drafter(self.vocab_size)

    def _ask(self, drafter: Drafter, requests: list[DraftRequest]) -> Proposal:
        if self.feature_size:
            requests = [with_features(request, self.feature_size) for request in requests]
        proposal = drafter.propose(requests)
        assert isinstance(proposal, Proposal), f"propose returned {type(proposal).__name__}, not a Proposal"
        check_proposal(proposal, requests, self.vocab_size)
        return proposal

    def _come_and_go(self, drafter: Drafter, seq_ids: range) -> None:
        tokens = next(histories(1, 8, self.vocab_size))
        for seq_id in seq_ids:
            self._ask(drafter, [request_for(seq_id, list(tokens), 2)])
            drafter.forget([seq_id])

    def _draws(self) -> Iterator[Proposal]:
        """Proposals for one request that is repeated with new noise each time."""
        tokens = next(histories(1, 9, self.vocab_size))
        request, drafter = request_for(0, tokens, 3, **_SAMPLED), self._new()
        for _ in range(_NUM_DRAWS):
            yield self._ask(drafter, [request])


def check_proposal(proposal: Proposal, requests: Sequence[DraftRequest], vocab_size: int) -> None:
    """Check that a proposal is legal. Raises AssertionError that says what is wrong and where."""
    for name in ("ids", "lens", "prob_rows"):
        dtype = getattr(proposal, name).dtype
        assert dtype == torch.int64, f"{name} must be int64, not {dtype}"
    assert len(proposal.lens) == len(requests), f"{len(requests)} requests are answered with {len(proposal.lens)} rows"
    num_prob_rows = 0 if proposal.probs is None else len(proposal.probs)
    if proposal.probs is not None:
        _check_laws(proposal, vocab_size)
    for b, request in enumerate(requests):
        where = f"row {b} (a history of {len(request.tokens)} tokens)"
        length = int(proposal.lens[b])
        assert length <= request.max_len, f"{where}: {length} draft tokens, but max_len is {request.max_len}"
        for token, named in zip(
            proposal.ids[b, :length].tolist(), proposal.prob_rows[b, :length].tolist(), strict=True
        ):
            assert 0 <= token < vocab_size, (
                f"{where}: id {token} is not in the vocabulary: valid ids are 0 to {vocab_size - 1}"
            )
            if named == CERTAIN:
                continue
            assert 0 <= named < num_prob_rows, (
                f"{where}: prob_rows names row {named}, but probs has {num_prob_rows} rows"
            )
            laws = proposal.token_probs
            assert laws is not None
            q = float(laws.after(named).dense(vocab_size)[0, token])
            assert q > 0, f"{where}: id {token} has probability {q} in the distribution it names"


def _check_laws(proposal: Proposal, vocab_size: int) -> None:
    probs = proposal.probs
    assert probs is not None
    width = vocab_size if proposal.kept_ids is None else proposal.kept_ids.shape[1]
    assert probs.ndim == 2, f"probs must be [R, {width}], not {tuple(probs.shape)}"
    assert probs.shape[1] == width, f"probs must have {width} columns, not {probs.shape[1]}"
    sums = probs.sum(-1, dtype=torch.float64)
    assert bool((probs >= 0).all()), "probs contains numbers below 0, or NaN"
    worst = float((sums - 1).abs().max()) if len(sums) else 0.0
    assert worst <= 1e-5, f"a row of probs sums to {float(sums[(sums - 1).abs().argmax()]):.6g}, not to 1"


def _rows(proposal: Proposal) -> list[list[int]]:
    return [ids[:length] for ids, length in zip(proposal.ids.tolist(), proposal.lens.tolist(), strict=True)]


def _orders(law: torch.Tensor) -> dict[str, torch.Tensor]:
    ids = torch.arange(len(law))
    return {"id": ids, "probability": law.argsort(stable=True), "odd and even id": torch.cat([ids[::2], ids[1::2]])}
