"""Training of encoder-decoders on pairs of a source and a text: files, blocks, and runs of the command on a toy model."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel
from typer.testing import CliRunner

from foredraft import LLM, SamplingParams
from foredraft.cli import app
from foredraft.errors import ForedraftError
from foredraft.model import LoadOptions, load_tokenizer
from foredraft.train.blocks import IGNORED
from foredraft.train.corpus import Pair, read_pairs, split_held_out_pairs
from foredraft.train.losses import DistillationLoss
from foredraft.train.objectives import Distillation, NextToken
from foredraft.train.pairs import PairIds, PairReader, pair_blocks, tokenize_pairs
from foredraft.train.peak_memory import pass_memory
from foredraft.train.students import load_for_training

QUICK = ("--context", "16", "--batch-size", "4", "--num-threads", "1")
PAIRS = [PairIds([5, 6, 7, 0], [9, 8, 0]), PairIds([4, 0], [7, 6, 5, 4, 0])]


def run(*args: str | Path) -> Any:
    return CliRunner().invoke(app, ["train", *(str(arg) for arg in args)])


@pytest.fixture(scope="module")
def model(toy_t5: Path) -> PreTrainedModel:
    return load_for_training(str(toy_t5))


def test_files_of_pairs_are_read(tmp_path: Path) -> None:
    tabbed, records = tmp_path / "a.tsv.gz", tmp_path / "b.jsonl"
    tabbed.write_bytes(gzip.compress(b"Good morning.\tGuten Morgen.\r\n\nHi.\tHallo.\n"))
    records.write_text('{"source": "def f():\\n\\treturn 1", "text": "Give one."}\n{"source": "x", "text": " "}\n')
    assert read_pairs(tabbed).documents == (Pair("Good morning.", "Guten Morgen."), Pair("Hi.", "Hallo."))
    assert read_pairs(records).documents == (Pair("def f():\n\treturn 1", "Give one."),)
    tabbed.write_bytes(gzip.compress(b"a\tb\na b\n"))
    with pytest.raises(ForedraftError, match=r"a\.tsv\.gz, line 2: must be a source and a text, separated by one tab"):
        read_pairs(tabbed)
    records.write_text('{"source": "x"}')
    with pytest.raises(ForedraftError, match='line 1: must be an object with a string "source" and a string "text"'):
        read_pairs(records)


def test_pairs_with_the_same_source_are_in_the_same_split() -> None:
    pairs = [Pair(f"source {i % 40}", f"text {i}") for i in range(120)]
    train, held_out = split_held_out_pairs(pairs, 0.3)
    assert len(train) + len(held_out) == 120
    assert held_out
    assert not {pair.source for pair in train} & {pair.source for pair in held_out}


def test_a_text_ends_with_one_end_token(toy_t5: Path) -> None:
    tokenizer = load_tokenizer(toy_t5, LoadOptions())
    ((source, text),) = tokenize_pairs([Pair("the cat", "the dog")], tokenizer)
    assert source == tokenizer("the cat")["input_ids"]
    assert text == [*tokenizer("the dog")["input_ids"], tokenizer.eos_token_id]
    tokenizer.eos_token_id = text[-2]
    assert tokenize_pairs([Pair("the cat", "the dog")], tokenizer)[0].text == text[:-1]


def test_a_block_is_a_source_and_a_text_both_cut_to_their_maximum() -> None:
    blocks = pair_blocks(PAIRS, 4)
    assert blocks.ids.tolist() == [[5, 6, 7, 0, 9, 8, 0, IGNORED], [4, 0, IGNORED, IGNORED, 7, 6, 5, 4]]
    assert blocks.next_ids.tolist() == [[IGNORED] * 4 + [9, 8, 0, IGNORED], [IGNORED] * 4 + [7, 6, 5, 4]]
    assert blocks.num_tokens == 7


def test_the_loss_is_that_of_each_pair_alone(model: PreTrainedModel) -> None:
    """Padding does not count: the loss equals transformers' own loss of each pair without padding."""
    blocks = pair_blocks(PAIRS, 8)
    ids, next_ids = blocks.ids.long(), blocks.next_ids.long()
    sums = NextToken(PairReader())(model, ids, next_ids, 0.0)
    alone = []
    for source, text in PAIRS:
        outputs = model(input_ids=torch.tensor([source]), labels=torch.tensor([text]))  # type: ignore[operator]
        alone.append(functional.cross_entropy(outputs.logits[0], torch.tensor(text), reduction="sum"))
    assert float(sums.loss.detach()) == pytest.approx(float(torch.stack(alone).sum().detach()), rel=1e-5)
    assert sums.num_rows == 8
    same = Distillation(model, DistillationLoss("kl", 1.0), PairReader())(model, ids, next_ids, 0.0)
    assert float(same.loss.detach()) == pytest.approx(0, abs=1e-4)
    assert same.acceptance == pytest.approx(8, abs=1e-4)


def test_memory_is_predicted_for_a_whole_block(model: PreTrainedModel) -> None:
    told = pass_memory(model, NextToken(PairReader()), (2, 16))
    assert told.gradients == 2 * 8 * 4096 * 4
    assert told.activations > 0


def test_a_model_is_trained_and_resumed_and_translates(toy_t5: Path, pairs: Path, tmp_path: Path) -> None:
    common = (
        "--pairs",
        pairs,
        "--architecture",
        toy_t5 / "config.json",
        "--tokenizer",
        toy_t5,
        *QUICK,
        "--validation-share",
        "0.2",
    )
    whole = run("lm", *common, "--out", tmp_path / "whole", "--steps", "30", "--json")
    assert whole.exit_code == 0, whole.stderr
    found = json.loads(whole.stdout)
    assert found["history"][-1]["loss"]["held-out text"] < 0.9 * found["history"][0]["loss"]["held-out text"]
    assert "text2text-generation" in (tmp_path / "whole" / "README.md").read_text()
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "whole").dtype == torch.bfloat16
    (output,) = LLM(tmp_path / "whole", method="suffix").generate("the cat sat", SamplingParams(max_tokens=4))
    assert output.outputs[0].token_ids
    again = run("lm", *common, "--out", tmp_path / "whole", "--steps", "30", "--json")
    assert json.loads(again.stdout)["history"] == found["history"]
    assert (
        "--batch-size" in run("lm", *common, "--out", tmp_path / "whole", "--steps", "30", "--batch-size", "2").stderr
    )


def test_a_draft_learns_the_answers_of_the_target(toy_t5: Path, pairs: Path, tmp_path: Path) -> None:
    out = tmp_path / "draft"
    asked = ("--temperature", "0", "--temperature", "1", "--generations", "8", "--only-generations", "--loss", "kl")
    arguments = ("distill", "--target", toy_t5, "--pairs", pairs, "--init", toy_t5, "--out", out, *QUICK, *asked)
    result = run(*arguments, "--steps", "2", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["history"][0]["acceptance"]["held-out text"] == pytest.approx(1, abs=1e-3)
    texts = [json.loads(line) for line in (out / "generations.jsonl").read_text().splitlines()]
    assert len(texts) == 8
    tokenizer = load_tokenizer(toy_t5, LoadOptions())
    source = tokenize_pairs(read_pairs(pairs).documents, tokenizer)[0].source
    llm = LLM(toy_t5, method="none")
    (output,) = llm.generate([source], SamplingParams(temperature=0.0, max_tokens=16))
    assert texts[0] == list(output.outputs[0].token_ids)[: len(texts[0])]


def test_incompatible_options_are_refused_in_one_line(
    toy: Path, toy_t5: Path, pairs: Path, text: Path, tmp_path: Path
) -> None:
    out = ("--out", tmp_path / "out", "--steps", "1", *QUICK)
    new = ("--architecture", toy_t5 / "config.json", "--tokenizer", toy_t5)
    refusals = {
        ("lm", "--pairs", pairs, "--data", text, *new): "not both",
        ("lm", "--data", text, *new): "the model is an encoder-decoder: give --pairs",
        ("lm", "--pairs", pairs, "--init", toy): "the model is a decoder-only model: give --data",
        ("distill", "--target", toy_t5, "--pairs", pairs): "give --architecture or --init",
        ("distill", "--target", toy_t5, "--pairs", pairs, "--layers", "1"): "--layers is for decoder-only models",
        ("distill", "--target", toy_t5, "--pairs", pairs, "--init", toy_t5, "--chats", "2"): "use --generations",
        ("head", "--target", toy_t5, "--pairs", pairs): "is an encoder-decoder",
    }
    for arguments, message in refusals.items():
        result = run(*arguments, *out)
        assert result.exit_code == 2, (arguments, result.stdout, result.stderr, result.exception)
        assert message in result.stderr.splitlines()[-1], result.stderr
