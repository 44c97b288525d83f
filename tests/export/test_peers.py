"""Exports checked with the engines' own classes, where `python -m benchmarks.peers.compare --setup ENGINE` has installed them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from benchmarks.peers.workers.gguf_convert import convert
from benchmarks.peers.workers.setup import missing, python_of
from foredraft.export import ENGINES
from foredraft.model import EMBEDDED
from tests.export.exporting import TARGET, export, options_of
from tests.heads.mtp_targets import saved
from tests.peers import ask

CHECKS = Path(__file__).parent / "vllm_checks.py"
RAY_SERVICE_CHECKS = Path(__file__).parent / "ray_service_checks.py"
BENTOML_SERVICE_CHECKS = Path(__file__).parent / "bentoml_service_checks.py"
LLAMACPP_CHECKS = Path(__file__).parent / "llamacpp_checks.py"

METHODS = [*ENGINES["vllm"].methods, "suffix+ngram", "suffix+ngram+draft_model", "none"]

pytestmark = [pytest.mark.slow, pytest.mark.peer]


def test_vllm_and_ray_accept_exports(tmp_path: Path) -> None:
    vllm, ray = {}, {}
    for method in METHODS:
        (tmp_path / method).mkdir()
        vllm[method] = options_of(export("vllm", method, tmp_path / method).text)
        (application,) = yaml.safe_load(export("ray", method, tmp_path / method / "ray").text)["applications"]
        (ray[method],) = application["args"]["llm_configs"]
    models = {"mtp": str(saved("glm"))}
    answers = ask("vllm", CHECKS, {"model": TARGET, "models": models, "vllm": vllm, "ray": ray})
    if any(answer.startswith("no Ray") for answer in answers.values()):
        answers = {name: answer for name, answer in answers.items() if not name.startswith("ray ")}
    assert answers == dict.fromkeys(answers, "")


def test_a_wrong_key_would_be_detected() -> None:
    wrong = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "disable_by_batch_size": 4}}
    answers = ask("vllm", CHECKS, {"model": TARGET, "vllm": {"wrong": wrong}})
    assert "disable_by_batch_size" in answers["wrong"]


def test_ray_serves_exports(tmp_path: Path) -> None:
    """One service with a model for each method; greedy texts are those that it writes without speculation."""
    configs = {}
    for method in ("none", "ngram", "suffix"):
        (tmp_path / method).mkdir()
        (application,) = yaml.safe_load(export("ray", method, tmp_path / method).text)["applications"]
        (configs[method],) = application["args"]["llm_configs"]
        configs[method]["engine_kwargs"]["dtype"] = "float32"  # in which rows do not depend on the batch
    answers = ask("vllm", RAY_SERVICE_CHECKS, {"configs": configs, "prompt": "def area(width, height):"})
    assert answers["none"]
    assert answers == dict.fromkeys(configs, answers["none"])


def test_bentoml_serves_exports(tmp_path: Path) -> None:
    """Services that start vLLM; greedy texts are those that it writes without speculation."""
    reason = missing("vllm")
    if reason is not None:
        pytest.skip(f"vllm is {reason}")
    services = {}
    for method in ("none", "ngram", "suffix"):
        (tmp_path / method).mkdir()
        services[method] = export("bentoml", method, tmp_path / method).text
    given = {"services": services, "vllm_python": str(python_of("vllm"))}
    answers = ask("bentoml", BENTOML_SERVICE_CHECKS, {**given, "model": TARGET, "prompt": "def area(width, height):"})
    assert answers["none"]
    assert answers == dict.fromkeys(services, answers["none"])


def test_llamacpps_server_runs_with_exports(tmp_path: Path) -> None:
    """Greedy texts are those that it writes without speculation."""
    methods = [*ENGINES["llamacpp"].methods, "ngram+draft_model", "none"]
    options = {}
    for method in methods:
        (tmp_path / method).mkdir()
        options[method] = options_of(export("llamacpp", method, tmp_path / method).text)
        for name in ("target", "draft"):  # instead of empty files
            convert(EMBEDDED / name, tmp_path / method / f"{name}.gguf", "bf16")
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    prompts = [tokenizer.encode(text) for text in ("def area(width, height):", "Once upon a time there was a")]
    answers = ask("llamacpp", LLAMACPP_CHECKS, {"prompts": prompts, "options": options})
    texts = {method: [answer["tokens"] for answer in answers[method]] for method in methods}
    assert all(len(text) == 32 for text in texts["none"])
    assert texts == dict.fromkeys(methods, texts["none"])
    drafted = {method for method in methods if any(answer["drafted"] for answer in answers[method])}
    assert {"draft_model", "ngram+draft_model"} <= drafted
    assert "none" not in drafted
