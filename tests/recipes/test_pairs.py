"""Pairs for the recipes of encoder-decoders: groups of sentences, functions with their docstrings, and the files written."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from transformers import AutoTokenizer, T5Config

from recipes.pairs import (
    LONGEST_GROUP,
    NEW_FILE,
    Pair,
    first_sentence,
    functions_of,
    grouped,
    summarisation,
    translation,
    write,
)

CODE = '''
def add(a, b):
    """Return the sum of a and b. It takes numbers.

    More.
    """
    return a + b

def untold(a):
    return a

def empty():
    """Do nothing at all."""
'''


def test_all_sentences_are_in_some_group() -> None:
    pairs = [Pair(f"e{i}", f"d{i}") for i in range(100)]
    groups = grouped(pairs, 0)
    assert sorted(word for group in groups for word in group.source.split()) == sorted(pair.source for pair in pairs)
    assert {len(group.source.split()) for group in groups} == set(range(1, LONGEST_GROUP + 1))
    for group in groups:
        assert [word[1:] for word in group.source.split()] == [word[1:] for word in group.text.split()]
    assert grouped(pairs, 0) == groups != grouped(pairs, 1)


def test_a_function_is_paired_with_the_first_sentence_of_its_docstring() -> None:
    assert list(functions_of(CODE)) == [Pair("def add(a, b):\n    return a + b", "Return the sum of a and b.")]
    assert list(functions_of("def broken(:")) == []
    assert first_sentence("Give the\n   mean of them\n\nThen more.") == "Give the mean of them"
    assert first_sentence("Too short.") == ""


def test_held_out_functions_come_from_other_files(tmp_path: Path) -> None:
    files = "".join(f"{NEW_FILE}{i}.py\n" + CODE.replace("add", f"add{i}") for i in range(300))
    (tmp_path / "sympy.txt.gz").write_bytes(gzip.compress(files.encode()))
    parts = summarisation(tmp_path)
    assert sum(map(len, parts.values())) == 300
    assert len(parts["train"]) > 250
    assert parts["val"]
    assert parts["test"]


def test_training_reads_the_written_files(tmp_path: Path) -> None:
    for part in ("train", "val", "test"):
        lines = "".join(f"The dog runs {i}.\tDer Hund rennt {i}. ||| Der Hund l\u00e4uft {i}.\n" for i in range(20))
        (tmp_path / f"tatoeba_en_de_{part}.tsv.gz").write_bytes(gzip.compress(lines.encode()))
    write(translation(tmp_path), tmp_path / "out", vocab_size=300)
    record = json.loads((tmp_path / "out" / "test.jsonl").read_text().splitlines()[0])
    assert "|||" not in record["text"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    ids = tokenizer(record["text"])["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == record["text"]
    for name in ("target", "draft"):
        config = T5Config.from_json_file(tmp_path / "out" / f"{name}.json")
        assert config.vocab_size >= len(tokenizer)
        assert config.decoder_start_token_id == 0
