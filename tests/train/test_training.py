"""Runs of the command on toy models: interrupted and resumed, refused, and used for drafting afterwards."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from foredraft import LLM, SamplingParams
from foredraft.cli import app
from foredraft.model import EMBEDDED
from foredraft.train import generations, run_folder, trainer
from foredraft.train.generations import GenerationSpec, generate, make_prompts, split_documents
from foredraft.train.records import read_log

QUICK = ("--context", "16", "--batch-size", "2", "--num-threads", "1")


def run(*args: str | Path) -> Any:
    return CliRunner().invoke(app, ["train", *(str(arg) for arg in args)])


def distill(toy: Path, text: Path, out: Path, *args: str | Path) -> Any:
    given = () if any(one in ("--epochs", "--budget") for one in args) else ("--steps", "6")
    return run("distill", "--target", toy, "--data", text, "--out", out, *QUICK, *given, *args)


def assert_refused(result: Any, *words: str) -> None:
    assert result.exit_code == 2, (result.exit_code, result.stdout, result.stderr, result.exception)
    assert result.stdout == ""
    *before, line = result.stderr.splitlines()
    assert all(each.startswith(("memory: ", "measuring held-out text", "training")) for each in before)
    assert line.startswith("error: ")
    for word in words:
        assert word in line, line


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read_log(out / "log.jsonl")]


def test_a_draft_is_trained_and_used(toy: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "draft"
    asked = (
        "--layers",
        "1",
        "--generations",
        "3",
        "--only-generations",
        "--temperature",
        "0.8",
        "--validation-share",
        "0.2",
        "--json",
    )
    result = distill(toy, text, out, *asked, "--licence", "text.txt=CC0")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["complete"]
    assert found["step"] == 6
    assert len((out / "generations.jsonl").read_text().splitlines()) == 3
    card = (out / "README.md").read_text()
    for word in ("text.txt", "CC0", "kl+tv", "temperature 0.8", "6 steps", "held-out text"):
        assert word in card
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
    llm = LLM(toy, out, dtype="float32", speculative_tokens=2)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    (output,), (plain,) = (one.generate("the cat sat", params) for one in (llm, llm.with_drafter("none")))
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert output.metrics.stats.num_draft_tokens > 0
    again = distill(toy, text, out, *asked, "--licence", "text.txt=CC0")
    assert json.loads(again.stdout)["step"] == 6


def test_an_untied_lm_head_is_kept(toy: Path, text: Path, tmp_path: Path) -> None:
    """The toy's embeddings are tied; the model that is trained, saved and loaded again has its own lm_head."""
    assert distill(toy, text, tmp_path / "out", "--own-head", "--checkpoint-every", "0s").exit_code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert not model.config.tie_word_embeddings


def test_written_texts_are_not_written_again(toy: Path, tmp_path: Path) -> None:
    """If the file is cut in the middle of a line, as by a kill, the missing texts are written as before."""
    documents = [[0, *range(100 + i, 120 + i)] for i in range(4)]
    spec = GenerationSpec(3, (0.8, 0.0), prompt_len=4, max_tokens=6, seed=5)
    shares: list[float] = []
    whole = generate(str(toy), documents, spec, tmp_path, shares.append)
    file = tmp_path / "generations.jsonl"
    raw = file.read_bytes()
    file.write_bytes(raw[: raw.index(b"\n") + 5])
    assert generate(str(toy), documents, spec, tmp_path, shares.append) == whole
    assert file.read_bytes() == raw
    assert generate(str(toy / "gone"), documents, spec, tmp_path, shares.append) == whole
    for text, prompt in zip(whole, make_prompts(documents, 3, 4), strict=True):
        assert text[: len(prompt)] == prompt


def test_documents_are_sampled_by_their_length() -> None:
    """One long file and many short ones with as many tokens. Pieces begin with the tokenizer's start token, if it has one."""
    documents = [[0, *range(100, 179)], *([0, *range(1, 10)] for _ in range(8))]
    pieces = split_documents(documents, 10, 0)
    assert pieces[:3] == [[0, *range(100, 109)], [0, *range(109, 119)], [0, *range(119, 129)]]
    assert len(pieces) == 16
    assert split_documents([[5, 6, 7]], 2, 0) == split_documents([[5, 6, 7]], 2, None) == [[5, 6], [7]]
    prompts = make_prompts(pieces, 4, 8)
    assert sum(prompt[1] >= 100 for prompt in prompts) == 2


@pytest.mark.slow
def test_distillation_brings_the_student_closer_to_the_target(toy: Path, text: Path, tmp_path: Path) -> None:
    result = distill(toy, text, tmp_path / "out", "--epochs", "12", "--validation-share", "0.2", "--json")
    assert result.exit_code == 0, result.stderr
    first, *_, last = json.loads(result.stdout)["history"]
    (kind,) = first["acceptance"]
    assert last["acceptance"][kind] > first["acceptance"][kind]


@pytest.mark.slow
def test_lm_trains_a_new_model_from_an_architecture(toy: Path, text: Path, tmp_path: Path) -> None:
    result = run(
        *(
            "lm",
            "--data",
            text,
            "--out",
            tmp_path / "out",
            *QUICK,
            "--epochs",
            "8",
            "--json",
            "--validation-share",
            "0.2",
        ),
        *("--architecture", toy / "config.json", "--tokenizer", toy),
    )
    assert result.exit_code == 0, result.stderr
    first, *_, last = json.loads(result.stdout)["history"]
    (kind,) = first["loss"]
    assert last["loss"][kind] < first["loss"][kind] - 0.5


def command(toy: Path, text: Path, out: Path, steps: int, *args: str) -> list[str]:
    return [
        *(sys.executable, "-m", "foredraft.cli", "train", "distill", "--target", str(toy), "--data", str(text)),
        *("--out", str(out), *QUICK, "--steps", str(steps), "--checkpoint-every", "0s", *args),
    ]


def killed_after(line: list[str], out: Path, num_steps: int, number: signal.Signals) -> int:
    """Send the signal after this many steps were logged. -> exit code"""
    process = subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if len(read_log(out / "log.jsonl")) >= num_steps:
            process.send_signal(number)
            break
        time.sleep(0.002)
    process.communicate(timeout=120)
    return process.returncode


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_resume(toy: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    line = command(toy, text, out, 5000)
    line[line.index("--checkpoint-every") + 1] = "1h"
    assert killed_after(line, out, 3, signal.SIGINT) == 130
    (last,) = run_folder.RunFolder(out).checkpoints
    assert run_folder.load_trainer(last)["step"] == len(losses(out))


def test_ctrl_c_while_texts_are_generated_says_how_to_resume(
    toy: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(generations, "complete", interrupted)
    result = distill(toy, text, tmp_path / "out", "--generations", "3")
    assert result.exit_code == 130
    assert result.stderr.splitlines() == [
        "writing 3 generations with the target",
        "stopped: give the same command again to continue",
    ]


def test_without_a_terminal_a_line_reports_each_stage(toy: Path, text: Path, tmp_path: Path) -> None:
    result = distill(toy, text, tmp_path / "out", "--generations", "3", "--validation-share", "0.2")
    assert result.exit_code == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if not line.startswith("memory: ")]
    assert lines[:3] == [
        "writing 3 generations with the target",
        "measuring held-out text at step 0",
        "training",
    ]
    assert "measuring held-out text at step 6" in lines


def test_a_run_that_was_killed_in_its_beginning_begins_anew(toy: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "checkpoints").mkdir(parents=True)
    (out / ".partial-training.json").write_text("{")
    assert distill(toy, text, out).exit_code == 0
    assert not list(out.glob(".partial-*"))
    (tmp_path / "b" / "checkpoints" / "mine").mkdir(parents=True)
    assert_refused(distill(toy, text, tmp_path / "b"), "contains unrelated files")


def test_other_arguments_are_refused_by_name(toy: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert distill(toy, text, out).exit_code == 0
    assert_refused(
        distill(toy, text, out, "--seed", "4"), "contains a run with --seed 0, not --seed 4: give the same arguments"
    )
    assert distill(toy, text, out, "--checkpoint-every", "9s").exit_code == 0
    text.write_text(text.read_text() + "<|endoftext|>more")
    assert_refused(distill(toy, text, out), f"a run with other contents of {text}")


def test_a_full_disk_leaves_the_last_checkpoint(
    toy: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    save, calls = torch.save, []

    def full(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        save(*args, **kwargs)

    monkeypatch.setattr(trainer.torch, "save", full)
    assert_refused(distill(toy, text, out, "--checkpoint-every", "0s"), "No space left on device", "kept")
    (last,) = run_folder.RunFolder(out).checkpoints
    assert run_folder.load_trainer(last)["step"] == 2
    assert not (out / "config.json").exists()
    monkeypatch.undo()
    assert distill(toy, text, out, "--checkpoint-every", "0s").exit_code == 0
    assert len(losses(out)) == 6


def test_a_loss_of_nan_ends_the_run(toy: Path, text: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(toy, broken)
    model = AutoModelForCausalLM.from_pretrained(toy)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    model.save_pretrained(broken)
    out = tmp_path / "out"
    assert_refused(distill(toy, text, out, "--init", broken), "the loss is nan", "step 0")
    assert not (out / "config.json").exists()
    assert distill(toy, text, out).exit_code == 0  # a run without a checkpoint has nothing to continue
    assert len(losses(out)) == 6


def test_bad_input_is_refused_in_one_line(toy: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    empty, latin = tmp_path / "empty.txt", tmp_path / "latin.txt"
    empty.write_text(" \n<|endoftext|>\n")
    latin.write_bytes(b"abc\xff")
    babyllama = Path(__file__).parents[3] / "shared" / "models" / "babyllama105"
    assert_refused(distill(toy, empty, out), "empty.txt", "no text")
    assert_refused(distill(toy, latin, out), "latin.txt", "byte 3")
    (tmp_path / "mbpp.jsonl").write_text('{"text": "a"}')
    assert_refused(distill(toy, tmp_path / "mbpp.jsonl", out), "benchmark")
    assert_refused(distill(toy, text, out, "--layers", "9"), "--layers", "3")
    assert_refused(distill(toy, text, tmp_path / "b", "--layers", "1", "--init", toy), "one of --init")
    assert_refused(distill(toy, text, tmp_path / "b", "--loss", "l2"), "--loss")
    assert_refused(distill(toy, text, tmp_path / "b", "--budget", "1s", "--steps", "3"), "one of --steps")
    assert_refused(distill(toy, text, tmp_path / "b", "--context", "65"), "65", "64")
    assert_refused(distill(tmp_path / "nowhere", text, tmp_path / "b"), "nowhere")
    assert_refused(distill(toy, text, toy), "contains unrelated files")
    assert_refused(distill(toy, text, tmp_path / "b", "--validation", "code"), "NAME=FILE")
    twice = ("--validation", f"a={text}", "--validation", f"a={empty}")
    assert_refused(distill(toy, text, tmp_path / "b", *twice), "--validation: 'a' is given twice")
    assert_refused(distill(toy, text, tmp_path / "b", "--dtype", "int3"), "--dtype")
    assert_refused(distill(toy, text, tmp_path / "b", "--only-generations"), "--generations")
    assert_refused(run("lm", "--data", text, "--out", tmp_path / "c", "--steps", "2"), "--architecture")
    bad = tmp_path / "config.json"
    bad.write_text('{"vocab_size": 3}')
    assert_refused(
        run("lm", "--data", text, "--out", tmp_path / "d", "--steps", "2", "--architecture", bad, "--tokenizer", toy),
        "config.json",
    )
    if babyllama.exists():
        assert_refused(distill(toy, text, tmp_path / "e", "--init", babyllama), "vocabulary")


def test_evaluate_predicts_what_the_engine_does(tmp_path: Path) -> None:
    file = tmp_path / "held_out.txt"
    words = "Once upon a time there was a little dog named Tim. He liked to play with his red ball in the big park. "
    file.write_text("<|endoftext|>".join(words + words[i:] for i in (0, 5, 9)))
    pair = ("--target", EMBEDDED / "target", "--draft", EMBEDDED / "draft", "--dtype", "float32", "--num-threads", "1")
    result = run(
        *("evaluate", *pair, "--data", f"story={file}", "--temperature", "0", "--speculative-tokens", "3", "--check"),
        *("--max-tokens", "24", "--budget", "none", "--json"),
    )
    assert result.exit_code == 0, result.stderr
    (kind,) = json.loads(result.stdout)["kinds"]
    (found,) = kind["of"]
    assert found["tau"] == pytest.approx(found["measured_tau"], rel=0.05)
    assert len(found["acceptance_by_position"]) == 3
    assert found["predicted_speedup"] is None
    assert found["tau_interval"]["low"] <= found["tau"] <= found["tau_interval"]["high"]
    assert_refused(run("evaluate", *pair), "--data")


def test_evaluate_says_how_many_texts_it_measured(tmp_path: Path) -> None:
    file = tmp_path / "held_out.txt"
    words = "Once upon a time there was a little dog named Tim. He liked to play with his red ball in the big park. "
    file.write_text(words * 2 + "<|endoftext|>too short")
    options = (
        *("evaluate", "--target", EMBEDDED / "target", "--draft", EMBEDDED / "draft", "--num-threads", "1"),
        *(
            "--data",
            f"story={file}",
            "--num-texts",
            "64",
            "--max-tokens",
            "4",
            "--temperature",
            "0",
            "--budget",
            "none",
        ),
    )
    result = run(*options)
    assert result.exit_code == 0, result.stderr
    assert "story: 1 of 64 texts were measured: there are 2 documents, 1 of them too short" in result.stdout
    assert "--separator" in result.stdout
    assert "no interval" in result.stdout
    (kind,) = json.loads(run(*options, "--json").stdout)["kinds"]
    assert (kind["num_texts"], kind["num_texts_asked"]) == (1, 64)
    assert (kind["num_documents"], kind["num_documents_too_short"]) == (2, 1)
    assert kind["of"][0]["tau_interval"] is None


def test_evaluate_does_not_mention_texts_if_all_were_measured(tmp_path: Path) -> None:
    file = tmp_path / "held_out.txt"
    words = "Once upon a time there was a little dog named Tim. He liked to play with his red ball in the big park. "
    file.write_text("<|endoftext|>".join(words + words[i:] for i in (0, 5, 9)))
    result = run(
        *("evaluate", "--target", EMBEDDED / "target", "--draft", EMBEDDED / "draft", "--num-threads", "1"),
        *("--data", f"story={file}", "--num-texts", "2", "--max-tokens", "4", "--temperature", "0", "--budget", "none"),
    )
    assert result.exit_code == 0, result.stderr
    assert "measured:" not in result.stdout
    assert "[" in result.stdout  # with an interval


def test_evaluate_predicts_the_speed(tmp_path: Path) -> None:
    file = tmp_path / "held_out.txt"
    file.write_text(
        "Once upon a time there was a little dog named Tim. He liked to play with his red ball in the big park. " * 3
    )
    result = run(
        *("evaluate", "--target", EMBEDDED / "target", "--draft", EMBEDDED / "draft", "--num-threads", "1"),
        *("--data", f"story={file}", "--max-tokens", "8", "--temperature", "0.8", "--budget", "0.01s"),
    )
    assert result.exit_code == 0, result.stderr
    assert "predicted speedup" in " ".join(result.stdout.split())


def test_help_is_printed() -> None:
    for name in ("lm", "distill", "evaluate"):
        assert run(name, "--help").exit_code == 0
