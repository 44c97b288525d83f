"""Heads attached to a target, as LLM does it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from foredraft import LLM, ForedraftError, ModelError, SamplingParams
from foredraft.bench.environment import Environment
from foredraft.heads import CompiledEagle, DFlashHead, EagleHead, MedusaHead, TargetEnds, attach_head
from foredraft.kernels import load_kernels
from foredraft.model import EMBEDDED, LanguageModel
from foredraft.settings import Settings
from foredraft.trace.recorder import header_of, record
from tests.heads.random_heads import HEAD_METHODS, embedded_head

PROMPTS = ["def add(a, b):", "Once upon a time"]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, speculative_tokens=4)


@pytest.mark.parametrize("method", HEAD_METHODS)
def test_the_method_is_detected_from_the_files(method: str) -> None:
    llm = LLM(EMBEDDED / "target", draft_model=embedded_head(method))
    assert llm.method == method
    texts = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
    plain = llm.with_drafter("none")
    assert texts == [output.outputs[0].token_ids for output in plain.generate(PROMPTS, GREEDY)]
    assert not llm.fallbacks


def test_a_head_may_be_one_of_several_drafters() -> None:
    llm = LLM(draft_model=embedded_head("eagle"), method="eagle+suffix")
    assert llm.method == "eagle+suffix"
    assert llm.with_drafter("eagle").method == "eagle"
    llm.generate(PROMPTS, SamplingParams(max_tokens=16, temperature=0.8))
    assert not [reason for _, reason in llm.fallbacks if reason == "failed"]  # it may be too slow to be used


def test_a_missing_or_unsuitable_head_is_refused() -> None:
    with pytest.raises(
        ForedraftError, match='method "eagle" needs an EAGLE head: give its directory or hub id as draft_model'
    ):
        LLM(EMBEDDED / "target", method="eagle")
    with pytest.raises(ForedraftError, match='"medusa" needs Medusa heads'):
        LLM(EMBEDDED / "target", method="medusa", draft_model=embedded_head("eagle"))
    with pytest.raises(ModelError, match="its files are not a head in a supported format"):
        LLM(EMBEDDED / "target", method="eagle", draft_model=EMBEDDED / "draft")


def test_cache_memory_covers_features_and_the_heads_own_keys_and_values() -> None:
    llm = LLM(EMBEDDED / "target", draft_model=embedded_head("eagle"))
    target = llm.target
    assert llm.engine.cache.taps == (2, 4, 5)
    features = 3 * target.hf.config.hidden_size * target.hf.dtype.itemsize
    assert llm.engine.cache.bytes_per_token == target.traits.bytes_per_token + features


def test_head_options_are_applied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "foredraft.toml"
    taps = {"taps": [1, 3, 4], "norm_output": False, "norm_before_residual": False}
    Settings(str(EMBEDDED / "target"), str(embedded_head("eagle")), head_window=9, head_settings=taps).write(file)
    with caplog.at_level(logging.INFO, "foredraft"):
        head = LLM(config=file)._builder.models.head
    assert isinstance(head, EagleHead | CompiledEagle)
    assert (head.config.taps, head.windows) == ((1, 3, 4), [9])
    assert not caplog.records  # no setting is ambiguous


def test_ambiguous_settings_are_tested_on_a_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "foredraft"):
        LLM(EMBEDDED / "target", embedded_head("eagle"))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f'{embedded_head("eagle")}: uses {{"taps": [2, 4, 5], ')


def test_a_compiled_target_has_a_compiled_head(target: LanguageModel) -> None:
    head = attach_head(str(embedded_head("eagle")), target)
    assert isinstance(head, EagleHead if load_kernels() is None else CompiledEagle)


def test_heads_use_the_targets_embeddings_and_lm_head(target: LanguageModel) -> None:
    ends = TargetEnds(target.hf)
    ids = torch.tensor([5, 7, 5])
    assert torch.equal(ends.embed(ids), target.hf.get_input_embeddings().weight[ids])
    x = torch.randn(2, target.hf.config.hidden_size).to(target.hf.dtype)
    assert ends.lm_head(x).shape == (2, target.traits.vocab_size)


@pytest.mark.parametrize("method", HEAD_METHODS)
def test_reports_name_the_head_instead_of_a_draft_model(method: str) -> None:
    llm = LLM(EMBEDDED / "target", draft_model=embedded_head(method), quantization="int8")
    is_rounded = load_kernels() is not None and isinstance(llm.head, CompiledEagle | DFlashHead | MedusaHead)
    assert llm.draft is None
    # without bfloat16 instructions a block drafter is in float32
    dtype = str(getattr(llm.head, "dtype", torch.bfloat16)).removeprefix("torch.")
    assert method == "dflash" or dtype == "bfloat16"
    assert llm.head_identity == (str(embedded_head(method)), dtype, "int8" if is_rounded else None)
    header = header_of(llm)
    assert header.draft is not None
    assert (header.method, header.draft.name) == (method, str(embedded_head(method)))
    environment = Environment.of(llm)
    assert environment.draft is None
    assert environment.head is not None
    assert environment.head.name == str(embedded_head(method))


@pytest.mark.skipif(load_kernels() is None, reason="heads are only rounded where the compiled kernels run them")
@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_a_head_in_four_bits_does_not_change_the_text(method: str) -> None:
    llm = LLM(EMBEDDED / "target", draft_model=embedded_head(method), draft_quantization="int4")
    assert llm.head_identity is not None
    assert llm.head_identity.quantization == "int4"
    texts = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
    plain = llm.with_drafter("none")
    assert texts == [output.outputs[0].token_ids for output in plain.generate(PROMPTS, GREEDY)]


def test_a_trace_has_the_probabilities_that_a_head_drew_from(tmp_path: Path) -> None:
    llm = LLM(EMBEDDED / "target", draft_model=embedded_head("eagle"), speculative_tokens=3)
    with record(llm, tmp_path / "trace.jsonl"):
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=12, temperature=0.8))
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    drafted = [token for line in lines if line["type"] == "round" for token in line["draft"]]
    assert drafted
    assert all(0 < token["q"] <= 1 for token in drafted)
    assert {line["drafter"] for line in lines if line["type"] == "round" and line["draft"]} == {"eagle"}
