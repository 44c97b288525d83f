"""Pairs of sources and texts for the encoder-decoder recipes, with a tokenizer and two architectures.

    python recipes/pairs.py translation PARALLEL OUT     English to German, in groups of one to six sentences
    python recipes/pairs.py summarisation CORPUS OUT     a Python function to the first sentence of its docstring

PARALLEL: the folder with tatoeba_en_de_train.tsv.gz, and _val and _test. CORPUS: the folder with Python corpora, one text file each
(.txt.gz). Writes train, val and test (.jsonl), a tokenizer trained on train.jsonl, and target.json and draft.json, the configurations of
T5 models of about 14 and 2.5 million parameters. The same files always give the same pairs.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, T5Config

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
VOCAB_SIZE = 8192
LONGEST_GROUP = 6
ROUNDS = 3
"""How often each sentence occurs in the training groups, with other neighbours each time."""

CODE = ("cpython311_stdlib", "thealgorithms", "keon_algorithms", "sympy", "networkx")
NEW_FILE = "# ===== file: "
HELD_OUT_SHARE = 0.02
LONGEST_FUNCTION, LONGEST_SUMMARY = 1500, 200
"""In characters."""


class Pair(NamedTuple):
    source: str
    text: str


def translation(folder: Path) -> dict[str, list[Pair]]:
    """Groups of sentences, joined by spaces. If a sentence has several translations, the first one is used."""
    parts = {part: _tabbed(folder / f"tatoeba_en_de_{part}.tsv.gz") for part in ("train", "val", "test")}
    return {
        "train": [group for seed in range(ROUNDS) for group in grouped(parts["train"], seed)],
        "val": grouped(parts["val"], 0),
        "test": grouped(parts["test"], 0),
    }


def grouped(pairs: Sequence[Pair], seed: int) -> list[Pair]:
    """All pairs once, in random groups of one to six."""
    order, draw = list(pairs), random.Random(seed)
    draw.shuffle(order)
    groups = []
    while order:
        size = draw.randint(1, LONGEST_GROUP)
        group, order = order[-size:], order[:-size]
        groups.append(Pair(*(" ".join(parts) for parts in zip(*group, strict=True))))
    return groups


def _tabbed(file: Path) -> list[Pair]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        pairs = [line.rstrip("\n").split("\t") for line in lines]
    return [Pair(source, text.split(" ||| ")[0]) for source, text in pairs]


def summarisation(folder: Path) -> dict[str, list[Pair]]:
    """Held-out pairs come from files that are not used for training."""
    parts: dict[str, list[Pair]] = {"train": [], "val": [], "test": []}
    for name in CODE:
        file = folder / f"{name}.txt.gz"
        if file.exists():
            for part, pair in _documented(gzip.decompress(file.read_bytes()).decode()):
                parts[part].append(pair)
    if not parts["train"]:
        raise SystemExit(f"{folder}: none of {', '.join(CODE)} (.txt.gz) holds functions with docstrings")
    return parts


def _documented(corpus: str) -> Iterator[tuple[str, Pair]]:
    for code in corpus.split(NEW_FILE):
        position = int.from_bytes(hashlib.sha256(code.encode()).digest()[:8], "big") / 2**64
        part = "val" if position < HELD_OUT_SHARE else "test" if position < 2 * HELD_OUT_SHARE else "train"
        for pair in functions_of(code.partition("\n")[2]):
            yield part, pair


def functions_of(code: str) -> Iterator[Pair]:
    """Each function without its docstring, and the docstring's first sentence."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
            continue
        if summary := first_sentence(ast.get_docstring(node) or ""):
            function = ast.unparse(ast.FunctionDef(**{**_fields(node), "body": node.body[1:]}))
            if len(function) <= LONGEST_FUNCTION and len(summary) <= LONGEST_SUMMARY:
                yield Pair(function, summary)


def _fields(node: ast.FunctionDef) -> dict[str, Any]:
    return {**dict(ast.iter_fields(node)), "lineno": node.lineno}


def first_sentence(docstring: str) -> str:
    """The first sentence of the first paragraph, on one line; empty if it is too short."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    sentence, dot, _ = paragraph.partition(". ")
    return sentence + dot.strip() if len(sentence.split()) > 2 else ""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE, which can encode any text. Encoded texts end with the end token."""
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[PAD, END, UNKNOWN],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN)


def t5(vocab_size: int, width: int, num_heads: int, mlp: int, num_layers: int) -> T5Config:
    """A T5 whose encoder and decoder have the same number of layers."""
    return T5Config(
        vocab_size=vocab_size,
        d_model=width,
        d_kv=64,
        num_heads=num_heads,
        d_ff=mlp,
        num_layers=num_layers,
        num_decoder_layers=num_layers,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        tie_word_embeddings=True,
    )


def write(parts: dict[str, list[Pair]], out: Path, vocab_size: int = VOCAB_SIZE) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for part, pairs in parts.items():
        lines = (json.dumps(pair._asdict(), ensure_ascii=False) + "\n" for pair in pairs)
        (out / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")
    texts = (text for pair in parts["train"] for text in pair)
    train_tokenizer(texts, vocab_size).save_pretrained(out / "tokenizer")
    for name, config in {
        "target": t5(vocab_size, 320, 5, 896, 4),
        "draft": t5(vocab_size, 192, 3, 512, 1),
    }.items():
        config.to_json_file(out / f"{name}.json", use_diff=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Pairs of sources and texts, a tokenizer and two architectures.")
    parser.add_argument("task", choices=("translation", "summarisation"))
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    make = {"translation": translation, "summarisation": summarisation}[args.task]
    write(make(args.data), args.out)


if __name__ == "__main__":
    main()
