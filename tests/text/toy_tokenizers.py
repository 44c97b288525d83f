"""Small tokenizers of every kind, and helpers for tests of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.tokenization_python import PythonBackend

MODELS = Path(__file__).resolve().parents[3] / "shared" / "models"
BAD = "\ufffd"
CORPUS = [
    "Once upon a time there was a cat, and it didn't like the rain.\n\n    def f(x):\n        return x + 1\n",
    "日本語のテキスト、中文文本。한국어 😀👩‍👩‍👧 naïve café — “quoted” 🎉🎉",
] * 5


def examples(number: int) -> settings:
    return settings(max_examples=number, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def fast_tokenizer(**kwargs: Any) -> PreTrainedTokenizerBase:
    return PreTrainedTokenizerFast(**kwargs)


def _byte_level() -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<eos>", "<pad>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = fast_tokenizer(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.add_tokens(["<tool>"])  # added, but not special
    return fast


def _byte_fallback() -> PreTrainedTokenizerBase:
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], *"▁abcdehlort.!'語"]
    merges = [("▁", "a"), ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("▁", "▁")]
    vocab = {piece: i for i, piece in enumerate([*pieces, *[a + b for a, b in merges]])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return fast_tokenizer(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _metaspace() -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    tokenizer.train_from_iterator(CORPUS, trainer)
    return fast_tokenizer(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def _word_piece(clean_up: bool) -> PreTrainedTokenizerBase:
    words = "[UNK] [CLS] [SEP] the cat do don ##s ##ing ##n ' ' t m ve re s n n't . , ? ! ## 語 ##語 ##."
    vocab = {word: i for i, word in enumerate(dict.fromkeys(words.split()))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=clean_up)
    kwargs: dict[str, Any] = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return fast_tokenizer(tokenizer_object=tokenizer, clean_up_tokenization_spaces=clean_up, **kwargs)


def _characters() -> PreTrainedTokenizerBase:
    """A tokenizer of single characters with clean-up over the whole text, so that spaces may be removed later."""
    vocab = {char: i for i, char in enumerate(["<unk>", *"abn'tmsver. ,?!"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return fast_tokenizer(tokenizer_object=tokenizer, unk_token="<unk>", clean_up_tokenization_spaces=True)


class _Stripped(PythonBackend):
    """A tokenizer in Python whose decoder strips white space at both ends, like the simplest SentencePiece ones."""

    def __init__(self, **kwargs: Any) -> None:
        self._pieces = ["<unk>", "</s>", "▁", "▁a", "b", "▁▁"]
        super().__init__(unk_token="<unk>", eos_token="</s>", **kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def get_vocab(self) -> dict[str, int]:
        return {piece: i for i, piece in enumerate(self._pieces)}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return list(text.replace(" ", "▁"))

    def _convert_token_to_id(self, token: str) -> int:
        return self.get_vocab().get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return self._pieces[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens).replace("▁", " ").strip()


def _shared(name: str) -> PreTrainedTokenizerBase:
    return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(MODELS / name))


BUILD: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "byte-level": _byte_level,
    "byte-fallback": _byte_fallback,
    "metaspace": _metaspace,
    "word-piece": lambda: _word_piece(False),
    "word-piece, cleaned": lambda: _word_piece(True),
    "characters, cleaned": _characters,
    "slow bytes": ByT5Tokenizer,
    "slow, stripped": _Stripped,
    "target": lambda: _shared("target"),
    "stories260K": lambda: _shared("stories260K"),
    "babyllama105": lambda: _shared("babyllama105"),
}
IN_SHARED = ("target", "stories260K", "babyllama105")
READ_BYTES = ("byte-level", "byte-fallback", "slow bytes", "target", "stories260K")  # these can encode any text


@cache
def build(name: str) -> PreTrainedTokenizerBase:
    return BUILD[name]()


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(cast("list[int]", tokenizer(text, add_special_tokens=False)["input_ids"]))


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], skip: bool) -> str:
    return cast(str, tokenizer.decode(list(ids), skip_special_tokens=skip))


def num_shared(a: str, b: str) -> int:
    return max(n for n in range(min(len(a), len(b)) + 1) if a[:n] == b[:n])


def expected_text(tokenizer: PreTrainedTokenizerBase, prompt: list[int], output: list[int], skip: bool) -> str:
    """The text that the pieces must join to."""
    before, after = decode(tokenizer, prompt, skip), decode(tokenizer, prompt + output, skip)
    return after[num_shared(before, after) :]


def ids_of(name: str, max_size: int = 60) -> st.SearchStrategy[list[int]]:
    """Any ids, or a few of them repeated: garbage, loops, runs of bytes."""
    one = st.integers(0, len(build(name)) - 1)
    few = st.lists(one, min_size=1, max_size=4).flatmap(lambda some: st.lists(st.sampled_from(some), max_size=max_size))
    return st.one_of(st.lists(one, max_size=max_size), few)


TEXTS = st.one_of(
    st.text(st.sampled_from("abc \n.,'語é😀👩‍👧hello日本"), max_size=40),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=15),
)


def byte_level_id(tokenizer: PreTrainedTokenizerBase, byte: int) -> list[int]:
    shown = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(bytes([byte]).decode("latin-1"))
    char = shown[0][0][-1] if byte >= 0x80 else chr(byte)
    table = {bytes([b]): c for b, c in _byte_table()}
    return [cast(int, tokenizer.convert_tokens_to_ids(table.get(bytes([byte]), char)))]


def _byte_table() -> Iterator[tuple[int, str]]:
    """GPT-2's characters for bytes: printable ones map to themselves, the rest to 256 and up."""
    extra = 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            yield byte, chr(byte)
        else:
            yield byte, chr(extra)
            extra += 1


def byte_id(tokenizer: PreTrainedTokenizerBase, byte: int) -> int:
    if isinstance(tokenizer, ByT5Tokenizer):
        return byte + 3
    token = f"<0x{byte:02X}>"
    found = cast("int | None", tokenizer.convert_tokens_to_ids(token))
    if found is not None and tokenizer.convert_ids_to_tokens(found) == token:
        return found
    found = cast("int | None", tokenizer.convert_tokens_to_ids(dict(_byte_table())[byte]))
    return 4 if found is None else found
