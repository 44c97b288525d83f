"""A file's tokenizer gives the ids of the tokenizer that its vocabulary comes from."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from foredraft.errors import ModelError
from foredraft.model import EMBEDDED
from foredraft.model.gguf.container import GGUFFile
from foredraft.model.gguf.metadata import Metadata
from foredraft.model.gguf.tokenizer import end_ids, tokenizer_of
from tests.model.gguf.writing import finish

TEXTS = (
    "Hello, world!",
    "  two  spaces, a\ttab\nand a line",
    "In 2024 it cost 1234567 €, naïve Ünïcode 漢字 🙂.",
    "def f(x):\n    return x ** 2  # it's",
    "",
    " ",
)
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>", "<think>"]
CONTROL, USER_DEFINED, BYTE = 3, 4, 6
Write = Callable[[gguf.GGUFWriter], None]


def file_of(path: Path, vocabulary: Sequence[str], write: Write, architecture: str = "llama") -> GGUFFile:
    writer = gguf.GGUFWriter(path / "model.gguf", architecture)
    writer.add_token_list(vocabulary)
    write(writer)
    finish(writer)
    return GGUFFile(path / "model.gguf")


def corpus() -> list[str]:
    return [file.read_text(encoding="utf-8") for file in sorted(Path(__file__).parent.glob("*.py"))] + list(TEXTS)


def byte_level(digits: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alone = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([alone, split]) if digits else split
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def sentencepiece(prefix: str) -> Tokenizer:
    """A tokenizer like Llama's: BPE on characters, with bytes for characters that are not in the vocabulary."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.normalizer = normalizers.Sequence([])
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[*SPECIAL, *(f"<0x{i:02X}>" for i in range(256))],
        max_token_length=12,
        show_progress=False,
    )
    # pieces are learned within words, as by SentencePiece
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=True)
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    return tokenizer


def model_of(tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """The vocabulary by id, and the merges in the file's form."""
    data = json.loads(tokenizer.to_str())["model"]
    vocabulary = sorted(data["vocab"], key=data["vocab"].get)
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in data["merges"]]
    return vocabulary, merges


def kinds_of(vocabulary: Sequence[str]) -> list[int]:
    kinds = dict.fromkeys(SPECIAL, CONTROL) | {"<think>": USER_DEFINED} | {f"<0x{i:02X}>": BYTE for i in range(256)}
    return [kinds.get(token, 1) for token in vocabulary]


def bpe_file(tokenizer: Tokenizer, path: Path, pre: str, **more: Any) -> GGUFFile:
    vocabulary, merges = model_of(tokenizer)

    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_types(kinds_of(vocabulary))
        writer.add_token_merges(merges)
        for name, value in more.items():
            getattr(writer, name)(value)

    return file_of(path, vocabulary, write)


@pytest.mark.parametrize(("pre", "digits"), [("gpt-2", False), ("smollm", True), ("starcoder", True)])
def test_byte_level_vocabularies(pre: str, digits: bool, tmp_path: Path) -> None:
    original = byte_level(digits)
    tokenizer = tokenizer_of(bpe_file(original, tmp_path, pre))
    for text in TEXTS:
        ids = original.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<s>a<|im_end|>") == [1, *original.encode("a").ids, 3]
    assert tokenizer.encode("a<think>") == [*original.encode("a").ids, 4]
    assert tokenizer.decode([3, 4], skip_special_tokens=True) == "<think>"


@pytest.mark.parametrize("prefix", ["first", "never"])
def test_sentencepiece_vocabularies(prefix: str, tmp_path: Path) -> None:
    original = sentencepiece(prefix)
    vocabulary, merges = model_of(original)
    ranks = {merge.replace(" ", ""): rank for rank, merge in reversed(list(enumerate(merges)))}

    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_types(kinds_of(vocabulary))
        writer.add_token_scores([float(-ranks.get(token, 10_000)) for token in vocabulary])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix(prefix == "first")

    tokenizer = tokenizer_of(file_of(tmp_path, vocabulary, write))
    for text in TEXTS[:-2]:
        ids = original.encode(text).ids
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        if prefix == "never" or not text.startswith(" "):  # transformers adds no prefix before a space
            assert tokenizer.decode(ids) == text


BOS: dict[str, tuple[str, dict[str, Any], list[int], list[int]]] = {
    "as the file says": ("gpt-2", {"add_add_bos_token": True, "add_add_eos_token": True}, [1], [2]),
    "not where it says no": ("llama-bpe", {"add_add_bos_token": False}, [], []),
    "Llama 3 by default": ("llama-bpe", {}, [1], []),
    "Pixtral by default": ("pixtral", {}, [1], []),
    "Mistral's Tekken by default": ("tekken", {}, [1], []),
    "GPT-2 not by default": ("gpt-2", {}, [], []),
    "Qwen not by default": ("qwen2", {}, [], []),
    "GLM-4 not by default": ("glm4", {}, [], []),
}


@pytest.mark.parametrize(("pre", "more", "before", "after"), BOS.values(), ids=BOS.keys())
def test_special_tokens_are_added_as_the_file_says(
    pre: str, more: dict[str, Any], before: list[int], after: list[int], tmp_path: Path
) -> None:
    file = bpe_file(byte_level(False), tmp_path, pre, add_bos_token_id=1, add_eos_token_id=2, **more)
    tokenizer = tokenizer_of(file)
    inner = tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.encode("Hello") == [*before, *inner, *after]


def test_special_tokens_end_ids_and_the_template_are_read(tmp_path: Path) -> None:
    file = bpe_file(
        byte_level(False),
        tmp_path,
        "gpt-2",
        add_bos_token_id=1,
        add_eos_token_id=2,
        add_pad_token_id=2,
        add_chat_template="{% for m in messages %}<s>{{ m['content'] }}{% endfor %}",
    )
    tokenizer = tokenizer_of(file)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", "</s>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "<s>Hi"
    # the file's own end id, and a control token that ends turns
    assert end_ids(Metadata(file), 700) == [2, 3]


def test_glm4_splits_as_its_regular_expression_says(tmp_path: Path) -> None:
    """The library does not know the name. The expression is that of DBRX and Llama 3."""
    original = byte_level(False)
    tokenizer, same = (tokenizer_of(bpe_file(original, folder(tmp_path, pre), pre)) for pre in ("glm4", "dbrx"))
    assert [tokenizer.encode(text) for text in TEXTS] == [same.encode(text) for text in TEXTS]
    assert tokenizer.encode(TEXTS[2]) != original.encode(TEXTS[2]).ids


def folder(path: Path, name: str) -> Path:
    (path / name).mkdir()
    return path / name


@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED, 1])
@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["a", "<end_of_turn>", "b"], [1]),
        (["<|end|>", "a", "<|endoftext|>"], [0, 2]),
        (["<|end|>", "<|return|>", "<|call|>", "<|channel|>"], [1, 2]),  # gpt-oss: the answer comes after <|end|>
        (["<|end|>", "<|return|>"], [0, 1]),
    ],
    ids=["Gemma", "Phi", "gpt-oss", "neither"],
)
def test_texts_end_at_known_tokens_of_any_type(
    tokens: list[str], expected: list[int], kind: int, tmp_path: Path
) -> None:
    """As in llama.cpp, since converters give these tokens wrong types."""
    file = file_of(tmp_path, tokens, lambda writer: writer.add_token_types([kind] * len(tokens)))
    assert end_ids(Metadata(file), len(tokens)) == expected


def test_the_embedded_tokenizer_survives_a_round_trip_through_a_file(tmp_path: Path) -> None:
    original = Tokenizer.from_file(str(EMBEDDED / "target" / "tokenizer.json"))
    tokenizer = tokenizer_of(bpe_file(original, tmp_path, "gpt-2"))
    encoded = original.encode(TEXTS[0], add_special_tokens=False).ids
    assert tokenizer.decode(encoded) == TEXTS[0]


def test_a_vocabulary_that_gives_no_tokenizer_is_refused(tmp_path: Path) -> None:
    file = file_of(tmp_path, ["a"], lambda writer: writer.add_tokenizer_model("rwkv"))
    with pytest.raises(ModelError, match="vocabulary of kind 'rwkv'"):
        tokenizer_of(file)
