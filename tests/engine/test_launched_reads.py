"""The target's pass over a draft that a device is still choosing: the text is that of a pass over known tokens, and the pass is repeated
if the draft turns out to be another. The embedded pair stands in for models on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.engine.engine import Engine
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.sequence import TokenSequence
from foredraft.kernels import DrawSpec
from foredraft.model import LanguageModel, RaggedBatch, Reading
from foredraft.model.generation import Generated, Generation
from foredraft.sampling import Pending, SamplingParams
from tests.host_copies import copied

PROMPTS = ([0, 549, 300, 11, 12, 300, 11, 12], [0, 616, 635, 271, 480], [0, *range(500, 540)], [0, 9])
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "seed": 2, "top_p": 0.9},
    "drawn": {"temperature": 1.0},
    "with penalties": {"temperature": 0.0, "repetition_penalty": 1.2},
}


class OnDevice:
    """A body that launches passes and generations as one on a device does. num_launched: passes over unknown tokens. num_known: passes
    over known drafts."""

    can_adjust = False

    def __init__(self, body: Any, last: int | None = None) -> None:
        self._body, self._last = body, last
        self.kernels, self.is_batch_invariant = body.kernels, body.is_batch_invariant
        self.num_launched = self.num_known = 0

    def __call__(self, batch: RaggedBatch, taps: Sequence[int] = ()) -> Reading:
        assert min(batch.ids) >= 0
        self.num_known += len(batch.wanted) > len(batch.spans)
        return self._body(batch, taps)  # type: ignore[no-any-return]

    def launch(self, batch: RaggedBatch, ids: Tensor, taps: Sequence[int] = ()) -> Reading:
        self.num_launched += 1
        numbers = ids.flatten().tolist()
        known = [max(numbers[-1 - token], 0) if token < 0 else token for token in batch.ids]
        return self._body(batch._replace(ids=known), taps)  # type: ignore[no-any-return]

    def can_generate(self, specs: Sequence[DrawSpec]) -> bool:
        return True

    def generate(
        self, batch: RaggedBatch, lens: Sequence[int], vocab_size: int, specs: Sequence[DrawSpec]
    ) -> Generation:
        """A draft ends before each `last`, as if the model's next row had a NaN."""
        ids, token_probs = self._body.generate(batch, lens, vocab_size, specs).result.resolve()
        ids = [row[: row.index(self._last)] if self._last in row else row for row in ids]
        table = torch.tensor([[*row, *[-1] * (max(lens) - len(row))] for row in ids])
        return Generation(Pending.of(Generated(ids, token_probs)), copied(table.T.contiguous()))

    def take_over(self) -> None: ...

    def warm_up(self, sizes: object) -> None: ...


def on_device(model: LanguageModel, last: int | None = None) -> LanguageModel:
    class Ahead(LanguageModel):
        runs_ahead = True

    return Ahead(model.hf, model.traits, OnDevice(model.body, last))


def engine_of(target: LanguageModel, draft: LanguageModel, gamma: int) -> Engine:
    pool = MemoryPool(1 << 28)
    drafter = DraftModelDrafter(draft, target.traits.vocab_size, pool)
    return Engine(target, drafter, pool, speculative_tokens=gamma, seed=0)


def texts_of(engine: Engine, settings: Sequence[dict[str, Any]], gammas: Sequence[int | None]) -> list[list[int]]:
    sequences: list[TokenSequence] = []
    for prompt in PROMPTS:
        for each, gamma in zip(settings, gammas, strict=True):
            params = SamplingParams(max_tokens=24, speculative_tokens=gamma, **each).resolve({})
            sequences.append(engine.add(prompt, params))
    while engine.has_work:
        engine.step()
    assert all(sequence.error is None for sequence in sequences)
    return [sequence.output_ids for sequence in sequences]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("gammas", [[4], [1], [3, 0, 5]], ids=str)
def test_texts_are_those_of_passes_over_known_tokens(
    target: LanguageModel, draft: LanguageModel, name: str, gammas: list[int]
) -> None:
    """Also where texts want drafts of different lengths, or none."""
    settings = [SETTINGS[name]] * len(gammas)
    ahead = on_device(target)
    engine, known = engine_of(ahead, on_device(draft), 4), engine_of(target, draft, 4)
    assert texts_of(engine, settings, gammas) == texts_of(known, settings, gammas)
    assert engine.stats == known.stats
    assert engine.stats.num_draft_tokens > 0
    body = ahead.body
    assert isinstance(body, OnDevice)
    # penalties change a draft's logits from token to token: it takes one pass for each, and the host knows all of them
    assert (body.num_launched > 0) == (name != "with penalties")
    assert (body.num_known > 0) == (name == "with penalties")


def test_texts_of_every_kind_run_together(target: LanguageModel, draft: LanguageModel) -> None:
    settings, gammas = [*SETTINGS.values()], [4] * len(SETTINGS)
    engine, known = engine_of(on_device(target), on_device(draft), 4), engine_of(target, draft, 4)
    assert texts_of(engine, settings, gammas) == texts_of(known, settings, gammas)


def test_the_pass_is_repeated_if_a_draft_ends_early(target: LanguageModel, draft: LanguageModel) -> None:
    """A draft ends where its model returns NaN. The target's pass has read something else by then."""
    plain = texts_of(engine_of(target, draft, 0), [SETTINGS["greedy"]], [0])
    common = max(set(plain[0]), key=plain[0].count)
    ahead = on_device(target)
    engine = engine_of(ahead, on_device(draft, last=common), 4)
    assert texts_of(engine, [SETTINGS["greedy"]], [4]) == plain
    body = ahead.body
    assert isinstance(body, OnDevice)
    assert body.num_launched > 0
    assert body.num_known > 0
