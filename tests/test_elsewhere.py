"""The whole engine with models whose logits are on another device: the texts are those of the CPU, and no operation mixes tensors of
both devices. Both compute in float64, for which the code path is the same on either."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.engine.engine import Engine
from foredraft.engine.step import Step
from foredraft.engine.token_tree import ROOT, TreeShape
from foredraft.model import EMBEDDED, LanguageModel, LoadOptions, RaggedBatch, Reading, WarmUpSizes, load_tokenizer
from foredraft.model.language_model import Body
from foredraft.policy import FixedPolicy
from foredraft.sampling import SamplingParams, StructuredOutputs, token_probs
from foredraft.text.frontend import Frontend
from foredraft.trace.probabilities import TargetProbabilities, draft_probabilities, target_probabilities
from tests.conftest import MakeEngine
from tests.far import Elsewhere, FarTensor, elsewhere

PROMPTS = ["def area(width, height):\n", "Once upon a time there was a little girl"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(EMBEDDED / "target", LoadOptions())


class Lifted:
    """A model body whose logits are float64, and on FAR if a device is given."""

    def __init__(self, inner: Body, device: Elsewhere | None) -> None:
        self.kernels, self.is_batch_invariant = inner.kernels, inner.is_batch_invariant
        self._inner, self._device = inner, device

    def __call__(self, batch: RaggedBatch, taps: Sequence[int] = ()) -> Reading:
        logits, hidden = self._inner(batch, taps)
        logits = logits.double()
        return Reading(logits if self._device is None else FarTensor(logits), hidden)

    def take_over(self) -> None:
        self._inner.take_over()

    def warm_up(self, sizes: WarmUpSizes) -> None:
        self._inner.warm_up(sizes)


class Trace:
    """Observes steps as the trace does."""

    def __init__(self) -> None:
        self.said: list[tuple[TargetProbabilities, list[float | None]]] = []

    def observe(self, step: Step) -> None:
        for b, (work, outcome) in enumerate(zip(step.scoring, step.outcomes, strict=True)):
            history = work.sequence.tokens[: len(work.sequence.tokens) - step.num_kept[b]]
            drafted = step.proposal.ids[b, : outcome.num_drafted].tolist()
            said = target_probabilities(outcome, work.sequence.sampler, history, outcome.new_ids[-1])
            self.said.append((said, draft_probabilities(step.proposal, b, drafted)))


def lifted(model: LanguageModel, device: Elsewhere | None) -> LanguageModel:
    return LanguageModel(model.hf, model.traits, Lifted(model.body, device))


def backwards(prefix: list[int], logits: Tensor) -> Tensor:
    return logits - 0.01 * torch.arange(logits.shape[0], device=logits.device)


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9},
    "rejection": {"temperature": 0.9, "verification": "rejection"},
    "seeded": {"seed": 7, "n": 2},
    "truncated": {"top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "flat": {"temperature": 20.0, "top_p": 0.999},
    "seeded and truncated": {"seed": 7, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {100: 5.0, 200: -100.0}, "temperature": 0.0},
    "words": {"bad_words": ["the", "return"], "min_tokens": 8, "temperature": 0.0},
    "processor": {"logits_processors": [backwards]},
    "log-probabilities": {"logprobs": 3, "prompt_logprobs": 2, "temperature": 0.0},
    "structured": {"structured_outputs": StructuredOutputs(regex="[a-z]{3} [0-9]{4}")},
    "structured and seeded": {"structured_outputs": StructuredOutputs(choice=["yes", "no", "perhaps"]), "seed": 3},
}


def outputs(engine: Engine, frontend: Frontend, kind: str, within: AbstractContextManager[Any]) -> list[Any]:
    params = SamplingParams(**{"max_tokens": 12, "temperature": 1.0, **KINDS[kind]})
    requests = [frontend.prepare(prompt, params) for prompt in PROMPTS]
    trace = Trace()
    engine.observers.append(trace)
    with within:
        for request in requests:
            frontend.start(request)
        while engine.has_work:
            engine.step()
    found = [request.output() for request in requests]
    assert not any(request.error for request in requests)
    texts = [[(one.token_ids, one.logprobs, one.cumulative_logprob) for one in output.outputs] for output in found]
    return [texts, [output.prompt_logprobs for output in found], trace.said]


@pytest.mark.parametrize(
    ("drafter", "shape"),
    [
        ("draft_model", None),
        ("suffix", None),
        ("draft_model", TreeShape((ROOT, ROOT, 0, 0))),
    ],
    ids=["draft_model", "suffix", "draft_model, trees"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_the_cpu(
    kind: str,
    drafter: str,
    shape: TreeShape | None,
    make_engine: MakeEngine,
    target: LanguageModel,
    draft: LanguageModel,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = elsewhere(monkeypatch)
    # a wider search may order equal values differently
    monkeypatch.setattr(token_probs, "_FIRST_WIDTH", token_probs._FIRST_DEVICE_WIDTH)
    found = []
    for own in (None, device):
        ends = [tokenizer.eos_token_id]
        policy = None if shape is None else FixedPolicy("DraftModelDrafter", shape)
        models = {"model": lifted(target, own), "draft_model": lifted(draft, own)}
        engine = make_engine(drafter, **models, seed=1, end_ids=ends, policy=policy)
        frontend = Frontend(engine, tokenizer, {})
        found.append(outputs(engine, frontend, kind, nullcontext() if own is None else own))
    assert found[0] == found[1]
    assert device.num_waits > 0


def test_a_greedy_step_waits_for_the_device_once(
    make_engine: MakeEngine, target: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = elsewhere(monkeypatch)
    engine = make_engine("suffix", model=lifted(target, device))
    for length in (4, 30):
        engine.add(list(range(100, 100 + length)), SamplingParams(temperature=0.0, max_tokens=20).resolve({}))
    num_steps = 0
    with device:
        while engine.has_work:
            engine.step()
            num_steps += 1
    assert device.num_waits == num_steps
