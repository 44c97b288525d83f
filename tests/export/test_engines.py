"""For every engine each method is exported or refused, in the engine's own terms."""

from __future__ import annotations

import ast
import json
import shutil
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from foredraft import ForedraftError
from foredraft.drafters import REGISTRY
from foredraft.export import ENGINES, Choice, choice_of
from foredraft.export.choice import MOST_DRAFT_TOKENS
from foredraft.heads.formats import FORMATS
from foredraft.llm import MAX_SPECULATIVE_TOKENS
from foredraft.settings import Settings
from tests.export import keys
from tests.export.exporting import DRAFT, TARGET, choice, export, gguf_files, options_of, words_of

METHODS = sorted(REGISTRY.keys() - {"none"})
CAN = [(name, method) for name, engine in ENGINES.items() for method in engine.methods if method != "early_exit"]
CANNOT = [(name, method) for name, engine in ENGINES.items() for method in engine.refused]
VLLMS = ("vllm", "bentoml", "ray")


def vllm_options(engine: str, text: str) -> dict[str, Any]:
    """The options that vLLM gets, whichever program starts it."""
    if engine == "ray":
        (application,) = yaml.safe_load(text)["applications"]
        (config,) = application["args"]["llm_configs"]
        given: dict[str, Any] = config["engine_kwargs"]
        return given
    if engine == "bentoml":
        (command,) = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.List))
        words = [node.value for node in command.elts if isinstance(node, ast.Constant)]
        options = options_of(" ".join(json.dumps(str(word)) if " " not in str(word) else f"'{word}'" for word in words))
        return {name: value for name, value in options.items() if name != "port"}
    return options_of(text)


@pytest.mark.parametrize("name", ENGINES)
def test_every_method_is_expressed_or_refused(name: str) -> None:
    engine = ENGINES[name]
    assert sorted([*engine.methods, *engine.refused]) == METHODS
    assert engine.name == name
    assert {method for methods in engine.combinations for method in methods} <= set(METHODS)


@pytest.mark.parametrize(("name", "method"), CANNOT)
def test_a_refusal_has_a_reason_and_the_nearest(name: str, method: str, tmp_path: Path) -> None:
    engine = ENGINES[name]
    gguf = gguf_files(tmp_path) if engine.reads_gguf else None
    chosen = choice("suffix", 4, gguf)
    refused = Choice(chosen.target, chosen.draft, (method,), 4)
    with pytest.raises(ForedraftError, match=f"cannot use {method}: .*nearest") as error:
        engine.export(refused)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "method"), CAN)
def test_each_difference_is_reported_once(name: str, method: str, tmp_path: Path) -> None:
    exported = export(name, method, tmp_path)
    assert exported.text.startswith(f"# {ENGINES[name].title} {ENGINES[name].version}\n")
    assert len(set(exported.differences)) == len(exported.differences) >= 4
    assert all(each.endswith(".") and "\n" not in each for each in exported.differences)
    assert any("seed" in each for each in exported.differences)


@pytest.mark.parametrize(("name", "method"), [pair for pair in CAN if pair[0] in VLLMS])
def test_vllm_only_gets_keys_that_it_accepts(name: str, method: str, tmp_path: Path) -> None:
    given = vllm_options(name, export(name, method, tmp_path).text)
    assert given.keys() <= {"speculative_config", "additional_config"}
    config = given["speculative_config"]
    assert config.keys() <= keys.VLLM_SPECULATIVE
    assert config["num_speculative_tokens"] == 4
    assert config.get("rejection_sample_method") is None


@pytest.mark.parametrize("name", VLLMS)
@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("draft_model", {"method": "draft_model", "model": DRAFT, "draft_sample_method": "probabilistic"}),
        ("ngram", {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}),
        ("suffix", {"method": "custom_class", "model": "foredraft.integrations.vllm.Proposer"}),
        ("mtp", {"method": "mtp"}),
    ],
)
def test_the_options_for_vllm_are_right(name: str, method: str, expected: dict[str, Any], tmp_path: Path) -> None:
    given = vllm_options(name, export(name, method, tmp_path).text)
    assert given["speculative_config"] == {**expected, "num_speculative_tokens": 4}
    assert ("additional_config" in given) == (method == "suffix")


@pytest.mark.parametrize(
    "methods", [some for n in (2, 3) for some in combinations(("suffix", "ngram", "draft_model"), n)]
)
def test_several_methods_use_the_vllm_plug_in(methods: tuple[str, ...], tmp_path: Path) -> None:
    given = vllm_options("vllm", export("vllm", "+".join(methods), tmp_path, "auto").text)
    options = given["additional_config"]["foredraft"]
    assert options["method"] == list(methods)
    assert options["speculative_tokens"] == "auto"
    assert options.get("draft_model") == (DRAFT if "draft_model" in methods else None)
    assert given["speculative_config"]["num_speculative_tokens"] == MOST_DRAFT_TOKENS == MAX_SPECULATIVE_TOKENS


@pytest.mark.parametrize("method", sorted(ENGINES["sglang"].methods))
@pytest.mark.parametrize("tokens", [1, 4])
def test_the_options_for_sglang_are_right(method: str, tokens: int, tmp_path: Path) -> None:
    given = options_of(export("sglang", method, tmp_path, tokens).text)
    assert given.keys() <= keys.SGLANG
    assert given["model_path"] == TARGET
    assert given["speculative_num_draft_tokens"] == tokens + 1, "it counts the pending token"
    algorithms = {"draft_model": "STANDALONE", "eagle": "EAGLE3", "ngram": "NGRAM"}
    assert given["speculative_algorithm"] == algorithms[method]
    assert given.get("speculative_use_rejection_sampling") == (True if method == "eagle" else None)


def test_sglang_adapts_only_heads(tmp_path: Path) -> None:
    given = options_of(export("sglang", "eagle", tmp_path, "auto").text)
    assert given["speculative_adaptive"] is True
    assert "speculative_num_steps" not in given
    with pytest.raises(ForedraftError, match="nearest alternative is a number"):
        export("sglang", "draft_model", tmp_path / "other", "auto")


@pytest.mark.parametrize("method", [*ENGINES["tensorrt-llm"].methods, "suffix+eagle"])
def test_the_options_for_tensorrt_llm_are_right(method: str, tmp_path: Path) -> None:
    given = yaml.safe_load(export("tensorrt-llm", method, tmp_path).text)
    assert given.keys() <= {"speculative_config", "disable_overlap_scheduler"}
    config = given["speculative_config"]
    assert config.keys() <= keys.TENSORRT_LLM[config["decoding_type"]]
    assert config["max_draft_len"] == 4
    assert ("sa_config" in config) == (method == "suffix+eagle")
    assert config.get("is_public_pool", config.get("enable_global_pool", False)) is False, "requests share no pool"


def test_the_options_for_max_are_right(tmp_path: Path) -> None:
    text = export("max", "eagle", tmp_path).text
    given = options_of(text)
    assert words_of(text)[:2] == ["max", "serve"]
    assert given.keys() <= keys.MAX
    assert given["draft_proposal"] == "sampled"
    assert given["num_speculative_tokens"] == 4


@pytest.mark.parametrize(
    ("method", "types"),
    [
        ("none", "none"),
        ("draft_model", "draft-simple"),
        ("ngram", "ngram-simple"),
        ("ngram+draft_model", "ngram-simple,draft-simple"),
    ],
)
def test_the_options_for_llamacpp_are_right(method: str, types: str, tmp_path: Path) -> None:
    given = options_of(export("llamacpp", method, tmp_path).text)
    assert given.keys() <= keys.LLAMACPP
    assert given["spec_type"] == types
    assert ("model_draft" in given) == ("draft_model" in method)


@pytest.mark.parametrize("name", ENGINES)
def test_plain_decoding_is_exported_without_speculation(name: str, tmp_path: Path) -> None:
    engine = ENGINES[name]
    gguf = gguf_files(tmp_path) if engine.reads_gguf else None
    for method, tokens in (("none", 4), ("suffix", 0)):
        text = engine.export(choice(method, tokens, gguf)).text
        assert "speculative" not in text.partition("\n")[2].replace("vllm-speculative", "")
        assert "assistant" not in text
        assert "prompt_lookup" not in text


@pytest.mark.parametrize("name", ENGINES)
def test_models_are_files_that_the_engine_can_read(name: str, tmp_path: Path) -> None:
    engine = ENGINES[name]
    wrong = choice("none", 4, None if engine.reads_gguf else gguf_files(tmp_path))
    with pytest.raises(ForedraftError, match=f"cannot load {wrong.target}: give"):
        engine.export(wrong)


def test_the_plug_in_is_named_where_vllm_cannot_use_auto(tmp_path: Path) -> None:
    with pytest.raises(ForedraftError, match=r"with --method suffix\+draft_model"):
        export("vllm", "draft_model", tmp_path, "auto")


def test_auto_is_refused_where_a_number_is_needed(tmp_path: Path) -> None:
    for name in ("vllm", "tensorrt-llm", "transformers", "openvino"):
        with pytest.raises(ForedraftError, match="--speculative-tokens 4"):
            export(name, "draft_model", tmp_path, "auto")


def test_vocabularies_of_other_sizes_are_refused_for_vllm(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 4000}')
    with pytest.raises(ForedraftError, match="4000 ids and the target's 4096"):
        ENGINES["vllm"].export(Choice(TARGET, str(tmp_path), ("draft_model",), 4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative_token_tree": [[0], [1]]}, "a tree of a fixed shape cannot be exported"),
        ({"head_settings": {"norm_output": True}}, "head_settings cannot be exported"),
        ({"method": "draft_model", "model": "gpt2"}, "needs a draft model"),
        ({"method": "sufix"}, "unknown method 'sufix'"),
    ],
)
def test_settings_that_cannot_be_exported_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ForedraftError, match=message):
        choice_of(Settings(**settings))


@pytest.mark.parametrize(
    ("engine", "target", "message"),
    [
        ("vllm", "target.gguf", "cannot load .*target.gguf: give the checkpoint in Hugging Face format"),
        ("llamacpp", "target.gguf", "llama.cpp .* cannot"),
        ("vllm", "broken", "broken: "),
    ],
)
def test_a_head_for_a_target_that_cannot_be_read_is_refused(
    engine: str, target: str, message: str, tmp_path: Path
) -> None:
    gguf_files(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    with pytest.raises(ForedraftError, match=message):
        ENGINES[engine].export(replace(choice("eagle"), target=str(tmp_path / target)))


def test_openvino_converts_models_of_one_name_into_two_folders(tmp_path: Path) -> None:
    target, draft = str(tmp_path / "a" / "final"), str(tmp_path / "b" / "final")
    text = ENGINES["openvino"].export(Choice(target, draft, ("draft_model",), 3)).text
    assert f"--model {target} --task text-generation-with-past final-openvino" in text
    assert f"--model {draft} --task text-generation-with-past final-draft-openvino" in text
    assert "'final-openvino'" in text
    assert "draft_model('final-draft-openvino'" in text


def test_quantization_and_trees_are_reported_as_not_exported() -> None:
    settings = Settings(method="ngram", speculative_tokens=2, quantization="int8", speculative_token_tree="auto")
    differences = ENGINES["vllm"].export(choice_of(settings)).differences
    assert any("rounding of weights" in each for each in differences)
    assert any("drafts are chains" in each for each in differences)


def test_weights_that_are_not_rounded_are_not_reported() -> None:
    settings = Settings(method="ngram", speculative_tokens=2, quantization="none")
    differences = ENGINES["transformers"].export(choice_of(settings)).differences
    assert not any("rounding of weights" in each for each in differences)


def test_the_plug_in_does_not_round_a_quantized_draft(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(DRAFT, draft)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    settings = Settings(model=TARGET, draft_model=str(draft), method="suffix+draft_model", quantization="int8")
    options = options_of(ENGINES["vllm"].export(choice_of(settings)).text)
    assert "draft_quantization" not in options["additional_config"]["foredraft"]


@pytest.mark.parametrize(
    ("rounding", "expected"),
    [
        ({"draft_quantization": "int8"}, "int8"),
        ({"quantization": "int4"}, "int4"),
        ({"quantization": "int8", "draft_quantization": "none"}, None),
    ],
)
def test_the_plug_in_rounds_its_draft_model(rounding: dict[str, str], expected: str | None) -> None:
    settings = Settings(method="suffix+draft_model", **rounding)  # type: ignore[arg-type]
    exported = ENGINES["vllm"].export(choice_of(settings))
    assert options_of(exported.text)["additional_config"]["foredraft"].get("draft_quantization") == expected
    assert any("rounding of weights" in each for each in exported.differences) == ("quantization" in rounding)


@pytest.mark.parametrize(
    ("name", "methods"),
    [
        (name, methods)
        for name, engine in ENGINES.items()
        for methods in (("suffix", "ngram"), ("suffix", "draft_model"))
        if frozenset(methods) not in engine.combinations
    ],
)
def test_the_nearest_to_several_methods_is_one_that_it_takes(
    name: str, methods: tuple[str, ...], tmp_path: Path
) -> None:
    """If it takes none of them, the refusal is that of the first one."""
    engine = ENGINES[name]
    gguf = gguf_files(tmp_path) if engine.reads_gguf else None
    with pytest.raises(ForedraftError) as error:
        engine.export(choice("+".join(methods), 4, gguf))
    possible = [method for method in methods if method in engine.methods]
    expected = f"--method {possible[0]}" if possible else engine.refused[methods[0]]
    assert str(error.value).endswith(expected)


def test_without_models_the_embedded_pair_is_exported() -> None:
    assert choice_of(Settings()) == Choice(TARGET, DRAFT, ("draft_model",), "auto")
    assert choice_of(Settings(method="suffix")) == Choice(TARGET, None, ("suffix",), "auto")


def test_forms_of_heads_exist() -> None:
    known = {form.name for form in FORMATS}
    for engine in ENGINES.values():
        assert {name for form in engine.heads.values() for name in form.names} <= known
