"""A drafter may write after what the target has read in the target's cache: no text and no key of the history depends on it."""

from __future__ import annotations

import torch

from foredraft.engine.engine import Engine
from foredraft.engine.proposal import DraftRequest, Proposal
from foredraft.engine.scheduler import Limits
from foredraft.model import LanguageModel
from foredraft.sampling import SamplingParams
from tests.conftest import MakeEngine
from tests.laws import run_audited

PROMPT = [0, 549, 300, *range(500, 540)]
PARAMS = (
    SamplingParams(max_tokens=20, temperature=0.0, speculative_tokens=4).resolve({}),
    SamplingParams(max_tokens=20, temperature=0.9, seed=3, speculative_tokens=4).resolve({}),
)


class Scribbler:
    """Writes large numbers wherever it may, in all layers, and drafts the last token again."""

    shares_cache = True

    def __init__(self) -> None:
        self.num_written = 0

    @torch.inference_mode()
    def propose(self, requests: list[DraftRequest]) -> Proposal:
        for request in requests:
            region = request.region
            assert region is not None
            start = len(region.tokens)
            assert list(region.tokens) == list(request.tokens[:start])
            for layer in region.layers:
                key, value = region.layer(layer)
                num_rows = request.max_len if request.has_all_keys else 0
                shape = (key.shape[0], num_rows, key.shape[2])
                region.write(layer, key.new_full(shape, 99.0), value.new_full(shape, -99.0), start)
                self.num_written += num_rows
            region.tokens.extend([7] * request.max_len)
        return Proposal.certain([[request.tokens[-1]] * min(1, request.max_len) for request in requests])

    def forget(self, seq_ids: list[int]) -> None:
        """There is no state to drop."""


class Bystander:
    """Drafts nothing, and does not share the cache."""

    def propose(self, requests: list[DraftRequest]) -> Proposal:
        assert all(request.region is None for request in requests)
        return Proposal.certain([[] for _ in requests])

    def forget(self, seq_ids: list[int]) -> None:
        """There is no state to drop."""


def texts(engine: Engine, preempted: bool = False) -> list[list[int]]:
    sequences = [engine.add(PROMPT, params) for params in PARAMS]
    for _ in range(4):
        engine.step()
    if preempted:
        engine.preempt(sequences[1])
    assert run_audited(engine, sequences, 60) == 0
    assert not engine.has_work
    return [sequence.output_ids for sequence in sequences]


def test_no_text_depends_on_what_is_written_after_the_history(make_engine: MakeEngine) -> None:
    plain = texts(make_engine("none"))
    for limits in (Limits(), Limits(max_batch_tokens=16)):
        for preempted in (False, True):
            scribbler = Scribbler()
            assert texts(make_engine(scribbler, limits=limits), preempted) == plain
            assert scribbler.num_written


def test_a_drafter_that_does_not_share_the_cache_gets_no_region(make_engine: MakeEngine) -> None:
    assert texts(make_engine(Bystander())) == texts(make_engine("none"))


def test_a_view_has_its_own_token_list(target: LanguageModel, make_engine: MakeEngine) -> None:
    engine = make_engine("none")
    sequence = engine.add(PROMPT, PARAMS[0])
    engine.step()
    region = engine.cache.region(sequence.seq_id)
    view, before = region.shared_view(), list(region.tokens)
    view.tokens.append(7)
    assert region.tokens == before
    assert all(torch.equal(a, b[:, : a.shape[1]]) for a, b in zip(region.layer(0), view.layer(0), strict=True))


def test_addresses_of_fewer_layers_are_the_first_of_all_addresses(
    target: LanguageModel, make_engine: MakeEngine
) -> None:
    """Whichever are requested first, and also after the region has moved."""
    engine = make_engine("none")
    sequence = engine.add(PROMPT, PARAMS[0])
    engine.step()
    region = engine.cache.region(sequence.seq_id)
    like = region.layer(0)[0]
    for capacity in (region.capacity, region.capacity + 64):
        region.resize(capacity)
        few = region.addresses(2, like)
        every = region.addresses(8, like)
        assert (len(few), len(every)) == (4, 16)
        assert every[:4] == few == region.addresses(2, like)
        assert every[14] == region.layer(7)[0].data_ptr()
