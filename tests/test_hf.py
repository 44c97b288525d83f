"""Speculation with models in memory, in place of transformers' own generate: the same call must give the same text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

import foredraft
from foredraft import DraftRequest, ForedraftError, Proposal
from foredraft.drafters import HybridDrafter
from foredraft.model import EMBEDDED
from foredraft.sampling import Pending
from tests.vocabulary.permuted import permuted_draft

PROMPTS = ["def add(a, b):", "Once upon a time there was a big dog and"]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(EMBEDDED / "target", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def draft_model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(EMBEDDED / "draft", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(EMBEDDED / "target", padding_side="left")


@pytest.fixture(scope="module")
def inputs(tokenizer: Any) -> Any:
    return tokenizer(PROMPTS, return_tensors="pt", padding=True)


SETTINGS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "greedy": lambda tokenizer: {},
    "max_length": lambda tokenizer: {"max_new_tokens": None, "max_length": 30},
    "repetition_penalty": lambda tokenizer: {"repetition_penalty": 1.3},
    "no_repeat_ngram": lambda tokenizer: {"no_repeat_ngram_size": 3},
    "min_new_tokens": lambda tokenizer: {"min_new_tokens": 20, "eos_token_id": [0, 15, 276]},
    "eos_list": lambda tokenizer: {"eos_token_id": [15, 276]},
    "stop_string": lambda tokenizer: {
        "stopping_criteria": StoppingCriteriaList([StopStringCriteria(tokenizer, ["return", "dog"])])
    },
}


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_greedy_text_is_that_of_generate(
    model: PreTrainedModel, draft_model: PreTrainedModel, tokenizer: Any, inputs: Any, name: str
) -> None:
    settings = {"max_new_tokens": 24, "do_sample": False, **SETTINGS[name](tokenizer)}
    expected = model.generate(**inputs, **settings)
    settings |= SETTINGS[name](tokenizer)  # criteria may be stateful
    custom = foredraft.custom_generate
    ours = model.generate(**inputs, **settings, custom_generate=custom, draft_model=draft_model)
    assert ours.tolist() == expected.tolist()
    undrafted = foredraft.generate(model, inputs, **settings)
    assert undrafted.tolist() == expected.tolist()


def test_inputs_may_be_keyword_arguments(model: PreTrainedModel, draft_model: PreTrainedModel, inputs: Any) -> None:
    settings: dict[str, Any] = {"draft_model": draft_model, "max_new_tokens": 8, "do_sample": False}
    expected = foredraft.generate(model, inputs, **settings)
    assert torch.equal(foredraft.generate(model, **inputs, **settings), expected)
    assert torch.equal(
        foredraft.generate(model, inputs["input_ids"], attention_mask=inputs["attention_mask"], **settings), expected
    )
    with pytest.raises(ForedraftError, match="there are no inputs"):
        foredraft.generate(model, **settings)


@pytest.mark.parametrize(("tokens", "is_asked"), [("auto", True), (4, False)])
def test_a_lookup_and_a_draft_model_share_the_drafting_with_auto(
    model: PreTrainedModel,
    draft_model: PreTrainedModel,
    inputs: Any,
    monkeypatch: pytest.MonkeyPatch,
    tokens: int | str,
    is_asked: bool,
) -> None:
    asked: list[object] = []
    begin = HybridDrafter.begin

    def recorded(self: HybridDrafter, requests: list[DraftRequest]) -> Pending[Proposal]:
        asked.append(self)
        return begin(self, requests)

    monkeypatch.setattr(HybridDrafter, "begin", recorded)
    settings = {"max_new_tokens": 48, "do_sample": False}
    expected = model.generate(**inputs, **settings)
    settings |= {"draft_model": draft_model, "method": "suffix+draft_model", "speculative_tokens": tokens}
    assert foredraft.generate(model, inputs, **settings).tolist() == expected.tolist()
    assert bool(asked) == is_asked


@pytest.mark.parametrize("strings", ["return", ["return", "dog"], [" bi", "ig d"], ["zzzz"]], ids=str)
def test_stop_strings_end_the_text_where_generate_does(
    model: PreTrainedModel, draft_model: PreTrainedModel, tokenizer: Any, inputs: Any, strings: Any
) -> None:
    settings = {"max_new_tokens": 24, "do_sample": False, "tokenizer": tokenizer, "stop_strings": strings}
    expected = model.generate(**inputs, **settings).tolist()
    assert foredraft.generate(model, inputs, draft_model=draft_model, **settings).tolist() == expected


def test_stop_strings_in_a_generation_config_and_with_other_criteria(
    model: PreTrainedModel, draft_model: PreTrainedModel, tokenizer: Any, inputs: Any
) -> None:
    config = GenerationConfig(max_new_tokens=24, do_sample=False, stop_strings=["dog"])
    expected = model.generate(**inputs, generation_config=config, tokenizer=tokenizer).tolist()
    got = foredraft.generate(model, inputs, draft_model=draft_model, generation_config=config, tokenizer=tokenizer)
    assert got.tolist() == expected
    assert config.stop_strings == ["dog"]
    settings: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "tokenizer": tokenizer}
    settings |= {"stop_strings": ["return"], "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(18)])}
    expected = model.generate(**inputs, **settings).tolist()
    assert foredraft.generate(model, inputs, draft_model=draft_model, **settings).tolist() == expected


class ForbidInPlace(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 15] = -torch.inf
        return scores


@pytest.mark.parametrize(
    "criteria", [[MaxLengthCriteria(20)], [EosTokenCriteria(eos_token_id=276)]], ids=["length", "end"]
)
def test_a_users_own_processors_and_criteria_are_applied(
    model: PreTrainedModel, draft_model: PreTrainedModel, inputs: Any, criteria: list[Any]
) -> None:
    settings: dict[str, Any] = {
        "max_new_tokens": 24,
        "do_sample": False,
        "logits_processor": LogitsProcessorList([ForbidInPlace()]),
        "stopping_criteria": StoppingCriteriaList(criteria),
    }
    expected = model.generate(**inputs, **settings)
    assert foredraft.generate(model, inputs, draft_model=draft_model, **settings).tolist() == expected.tolist()


def test_a_seeded_text_does_not_depend_on_the_draft(
    model: PreTrainedModel, draft_model: PreTrainedModel, inputs: Any
) -> None:
    settings = {"max_new_tokens": 20, "do_sample": True, "temperature": 0.9, "top_k": 30, "seed": 4}
    plain = foredraft.generate(model, inputs, method="none", **settings)
    for other in (
        {"draft_model": draft_model},
        {"method": "ngram"},
        {"exit_layer": 4},
        {"draft_model": draft_model, "speculative_tokens": 7},
    ):
        assert foredraft.generate(model, inputs, **settings, **other).tolist() == plain.tolist()


@pytest.mark.parametrize("settings", [{"do_sample": False}, {"do_sample": True, "seed": 3}], ids=str)
def test_a_draft_with_another_tokenizer(
    model: PreTrainedModel, tokenizer: Any, inputs: Any, settings: dict[str, Any]
) -> None:
    draft = AutoModelForCausalLM.from_pretrained(permuted_draft(), dtype=torch.float32).eval()
    both = {"tokenizer": tokenizer, "assistant_tokenizer": AutoTokenizer.from_pretrained(permuted_draft())}
    plain = foredraft.generate(model, inputs, method="none", max_new_tokens=24, **settings)
    drafted = foredraft.generate(model, inputs, draft_model=draft, max_new_tokens=24, **both, **settings)
    assert drafted.tolist() == plain.tolist()
    with pytest.raises(ForedraftError, match="give tokenizer= too"):
        foredraft.generate(model, inputs, draft_model=draft, assistant_tokenizer=both["assistant_tokenizer"])


def test_unseeded_sampling_follows_torchs_seed(
    model: PreTrainedModel, draft_model: PreTrainedModel, inputs: Any
) -> None:
    def sample(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        return foredraft.generate(model, inputs, draft_model=draft_model, max_new_tokens=16, do_sample=True).tolist()

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_several_texts_of_one_prompt_differ(model: PreTrainedModel, draft_model: PreTrainedModel, inputs: Any) -> None:
    out = foredraft.generate(
        model, inputs, draft_model=draft_model, max_new_tokens=16, do_sample=True, num_return_sequences=3, seed=1
    )
    assert out.shape[0] == 6
    assert len({tuple(row) for row in out.tolist()}) == 6


def test_the_users_model_is_not_changed(model: PreTrainedModel, draft_model: PreTrainedModel, inputs: Any) -> None:
    before = model.config._attn_implementation
    model.train()
    draft_model.train()
    foredraft.generate(model, inputs, draft_model=draft_model, max_new_tokens=2, do_sample=False)
    assert model.training
    assert draft_model.training
    model.eval()
    draft_model.eval()
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    foredraft.generate(model, inputs, draft_model=draft_model, max_new_tokens=8, do_sample=False)
    assert model.config._attn_implementation == before
    assert model.generate(**inputs, max_new_tokens=8, do_sample=False).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_beams": 3}, "num_beams"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"method": "magic"}, "unknown method"),
        ({"streamer": object()}, "streamer"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"method": "draft_model"}, "needs a draft model"),
        ({"method": "eagle"}, 'method "eagle" is for LLM'),
        ({"method": "suffix+self-int8"}, 'method "self-int8" is for LLM'),
        ({"draft_model": "a/directory"}, "draft_model must be a transformers model, not str"),
        ({"stop_strings": ["dog"]}, "give tokenizer="),
        ({"token_healing": True}, "token_healing"),
    ],
)
def test_unsupported_settings_are_refused(
    model: PreTrainedModel, inputs: Any, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ForedraftError, match=reason):
        foredraft.generate(model, inputs, max_new_tokens=4, **settings)
