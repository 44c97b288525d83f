"""Loading a target with its drafts: one vocabulary, each model loaded once, and end ids and defaults from the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from foredraft.engine.models import LoadedModels, check_logit_width, head_format
from foredraft.errors import VocabularyError
from foredraft.kernels import WeightFormat, quantize_int4, quantize_int8, unquantized
from foredraft.model import EMBEDDED, LanguageModel, LoadOptions, WarmUpSizes
from tests.model.gguf.writing import write_model


def load(source: Any = EMBEDDED / "target", draft: Any = None, tokenizer: Any = None) -> LoadedModels:
    return LoadedModels(source, draft, tokenizer, LoadOptions(), draft_quantization=None)


@pytest.fixture(scope="module")
def models() -> LoadedModels:
    return load(draft=EMBEDDED / "draft")


def test_a_pair_is_loaded_with_the_targets_tokenizer(models: LoadedModels) -> None:
    assert models.tokenizer is not None
    assert models.draft_for("draft_model") is models.drafts["draft_model"]
    assert models.draft_for("self-int8") is None
    assert not models.is_in_memory
    assert models.draft_options == models.options


def test_a_copy_of_the_target_is_loaded_once(models: LoadedModels) -> None:
    models.load_own_drafts(["suffix", "self-int8"])
    copied = models.draft_for("self-int8")
    models.load_own_drafts(["self-int8"])
    assert copied is not None
    assert models.draft_for("self-int8") is copied is models.drafts["self-int8"]
    assert set(models.drafts) == {"draft_model", "self-int8"}


@pytest.mark.slow
def test_a_model_in_memory_needs_no_tokenizer(models: LoadedModels) -> None:
    target, draft = (AutoModelForCausalLM.from_pretrained(EMBEDDED / name) for name in ("target", "draft"))
    in_memory = load(target, draft)
    assert in_memory.is_in_memory
    assert in_memory.tokenizer is None
    assert set(in_memory.drafts) == {"draft_model"}
    assert load(target, tokenizer=models.tokenizer).tokenizer is models.tokenizer


@pytest.mark.parametrize(("difference", "is_refused"), [(0, False), (512, False), (513, True), (-513, True)])
def test_logits_may_be_wider_only_by_padding(difference: int, is_refused: bool) -> None:
    target, draft = (SimpleNamespace(traits=SimpleNamespace(vocab_size=n)) for n in (4096, 4096 + difference))
    if not is_refused:
        check_logit_width(target, draft)  # type: ignore[arg-type]
        return
    with pytest.raises(VocabularyError, match=f"{4096 + difference} wide, but the target's are 4096 wide"):
        check_logit_width(target, draft)  # type: ignore[arg-type]


def test_end_ids_and_defaults_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    for file in (EMBEDDED / "target").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7], "top_k": 7}))
    models = load(tmp_path)
    assert models.end_ids == [0, 7]
    assert models.sampling_defaults["top_k"] == 7
    config, text_config = models.target.hf.generation_config, models.target.hf.config.get_text_config()
    config.eos_token_id, text_config.eos_token_id = None, 5
    assert models.end_ids == [5]
    text_config.eos_token_id = None
    assert models.tokenizer is not None
    assert models.end_ids == [models.tokenizer.eos_token_id]


def test_all_models_are_warmed_up_for_the_same_steps(models: LoadedModels, monkeypatch: pytest.MonkeyPatch) -> None:
    demands: list[WarmUpSizes] = []
    monkeypatch.setattr(LanguageModel, "warm_up", lambda model, demand: demands.append(demand))
    models.warm_up(3, 5)
    vocab_size = models.target.traits.vocab_size
    assert demands[0] == WarmUpSizes(3, 6, vocab_size, drafts=False)
    assert demands[1:] == [WarmUpSizes(3, 5, vocab_size, drafts=True)] * len(models.drafts)


def test_the_key_of_the_stored_state_has_all_that_it_depends_on(models: LoadedModels) -> None:
    paired, alone = models.state_key(["draft_model"], ["draft_model"]), load().state_key(["suffix"], ["suffix"])
    assert paired.keys() == {"machine", "drafters", "target", "draft"}
    assert alone.keys() == {"machine", "drafters", "target"}
    assert paired["target"] == alone["target"]
    assert (paired["drafters"], alone["drafters"]) == (["draft_model"], ["suffix"])


@pytest.mark.parametrize(
    ("options", "own", "expected"),
    [
        (LoadOptions(), None, (unquantized, unquantized)),
        (LoadOptions(quantization="int8"), None, (quantize_int8, quantize_int4)),
        (LoadOptions(quantization="int4"), None, (quantize_int8, quantize_int4)),
        (LoadOptions(quantization="int4"), "none", (unquantized, unquantized)),
        (LoadOptions(quantization="int4"), "int8", (quantize_int8, quantize_int8)),
        (LoadOptions(), "int8", (quantize_int8, quantize_int8)),
        (LoadOptions(), "int4", (quantize_int4, quantize_int4)),
        (LoadOptions(), "int4-all", (quantize_int4, quantize_int4)),
    ],
)
def test_a_head_has_the_requested_format_or_is_rounded_like_its_target(
    options: LoadOptions, own: str | None, expected: tuple[WeightFormat, WeightFormat]
) -> None:
    assert head_format(EMBEDDED / "target", options, own) == expected


def test_a_target_stored_in_few_bits_has_a_rounded_head(tmp_path: Path) -> None:
    hf = AutoModelForCausalLM.from_pretrained(EMBEDDED / "draft")
    stored = write_model(hf, tmp_path / "model.gguf", "Q4_0")
    assert head_format(stored, LoadOptions()) == (quantize_int8, quantize_int4)
    assert head_format(stored, LoadOptions(), "none") == (unquantized, unquantized)
