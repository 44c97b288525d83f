"""Whatever bytes a file contains, it is read or refused in one line, and no more is allocated than the file can contain."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch

from foredraft.errors import ModelError
from foredraft.model import LoadOptions
from foredraft.model.gguf import GGUFCheckpoint
from foredraft.model.gguf.container import GGUFFile
from foredraft.model.stored import materialize
from tests.model import zoo
from tests.model.gguf.writing import finish, write_model

Change = Callable[[bytearray], None]


@pytest.fixture(scope="module")
def model_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a whole model with a vocabulary."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    config = zoo.Species("llama", {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}).config()

    def add_vocabulary(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([*(chr(33 + i) for i in range(94)), "ab", "abc"])
        writer.add_token_types([1] * zoo.VOCAB_SIZE)
        writer.add_token_merges(["a b", "ab c"])
        writer.add_eos_token_id(2)

    return write_model(zoo.random_model(config), path, "Q4_0", add_vocabulary).read_bytes()


def test_metadata_and_tensors_are_those_that_the_gguf_package_reads(model_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(model_bytes)
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            value = ours.metadata[key]
            expected = field.contents()
            assert (list(value) if isinstance(expected, list) else value) == expected, key
    assert {tensor.name for tensor in theirs.tensors} == ours.tensors.keys()
    for tensor in theirs.tensors:
        entry = ours.tensors[tensor.name]
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert entry.kind == tensor.tensor_type.name
        assert ours.rows(entry).tobytes() == tensor.data.tobytes()


def put(form: str, offset: int, *values: int) -> Change:
    def change(data: bytearray) -> None:
        struct.pack_into(form, data, offset, *values)

    return change


def cut(length: int) -> Change:
    def change(data: bytearray) -> None:
        del data[length:]

    return change


def put_at(text: bytes, after: int, form: str, *values: int) -> Change:
    """A change of a file that writes the values `after` bytes behind the first occurrence of the text."""

    def change(data: bytearray) -> None:
        struct.pack_into(form, data, data.index(text) + len(text) + after, *values)

    return change


TENSOR = b"output_norm.weight"
"""A tensor's name. After it: the number of dimensions (4 bytes), one dimension (8), the type (4), the offset (8)."""

MALFORMED: dict[str, tuple[Change, str]] = {
    "no bytes": (cut(0), "empty"),
    "cut in the header": (cut(20), "truncated or damaged"),
    "cut in the metadata": (cut(300), "truncated or damaged"),
    "cut in the tensors": (cut(-40), "ends before its tensor"),
    "another magic": (put("<4s", 0, b"GGML"), "does not begin with GGUF"),  # type: ignore[arg-type]
    "version 1": (put("<I", 4, 1), "version 1"),
    "big-endian": (put(">I", 4, 3), "big-endian"),
    "a version of the future": (put("<I", 4, 77), "version 77"),
    "2^60 tensors": (put("<Q", 8, 1 << 60), "truncated or damaged"),
    "2^60 entries": (put("<Q", 16, 1 << 60), "truncated or damaged"),
    "a name of 2^63 bytes": (put("<Q", 24, 1 << 63), "truncated or damaged"),
    "an array of 2^62 strings": (put_at(b"tokenizer.ggml.tokens", 8, "<Q", 1 << 62), "truncated or damaged"),
    "an array of an unknown type": (put_at(b"tokenizer.ggml.tokens", 4, "<I", 99), "unknown type 99"),
    "arrays of arrays": (put_at(b"tokenizer.ggml.tokens", 4, "<I", 9), "unknown type 9"),
    "an unknown type of value": (put_at(b"llama.context_length", 0, "<I", 99), "unknown type 99"),
    "no dimensions": (put_at(TENSOR, 0, "<I", 0), "0 dimensions"),
    "a million dimensions": (put_at(TENSOR, 0, "<I", 1_000_000), "1000000 dimensions"),
    "an empty tensor": (put_at(TENSOR, 4, "<Q", 0), "cannot have the shape [0]"),
    "a tensor beyond the file": (put_at(TENSOR, 4, "<Q", 1 << 40), "ends before its tensor"),
    "an unknown type of tensor": (put_at(TENSOR, 12, "<I", 250), "unknown type 250"),
    "an offset that is not aligned": (put_at(TENSOR, 16, "<Q", 33), "ends before its tensor"),
    "an offset beyond the file": (put_at(TENSOR, 16, "<Q", 1 << 62), "ends before its tensor"),
    "tensors in one place": (put_at(TENSOR, 16, "<Q", 0), "overlap"),
}


@pytest.mark.parametrize(("change", "words"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_file_is_refused_with_its_reason(
    change: Change, words: str, model_bytes: bytes, tmp_path: Path
) -> None:
    data = bytearray(model_bytes)
    change(data)
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError) as caught:
        GGUFFile(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert words in message
    assert "\n" not in message


LYING: dict[str, tuple[Change, str]] = {
    "a billion layers": (put_at(b"llama.block_count", 4, "<I", 1_000_000_000), "1000000000 layers"),
    "no layers": (put_at(b"llama.block_count", 4, "<I", 0), "block_count"),
    "another width": (put_at(b"llama.embedding_length", 4, "<I", 64), "metadata describes"),
    "a width of a billion": (put_at(b"llama.embedding_length", 4, "<I", 1_000_000_000), "metadata describes"),
    "a billion heads": (
        put_at(b"llama.attention.head_count", 4, "<I", 1_000_000_000),
        "metadata does not describe a model",
    ),
    "no heads": (put_at(b"llama.attention.head_count", 4, "<I", 0), "head_count"),
    "a width that is no integer": (put_at(b"llama.embedding_length", 0, "<I", 6), "not an integer"),
}


@pytest.mark.parametrize(("change", "words"), LYING.values(), ids=LYING.keys())
def test_false_metadata_is_refused(change: Change, words: str, model_bytes: bytes, tmp_path: Path) -> None:
    data = bytearray(model_bytes)
    change(data)
    message = refusal(bytes(data), tmp_path / "model.gguf")
    assert message is not None
    assert words in message


def test_a_missing_and_a_superfluous_tensor_are_named(model_bytes: bytes, tmp_path: Path) -> None:
    renamed = model_bytes.replace(TENSOR, b"output_form.weight")
    message = refusal(renamed, tmp_path / "model.gguf")
    assert message is not None
    assert "'output_norm.weight'" in message


def refusal(data: bytes, path: Path) -> str | None:
    """The one-line reason for which a file's model, or else its tokenizer, is refused; None if it is read. Other errors fail the test."""
    path.write_bytes(data)
    checkpoint = GGUFCheckpoint(str(path), LoadOptions(dtype="float32", kernels="torch"))

    def read_model() -> None:
        checkpoint.check(has_weights=True)
        config = checkpoint.config()
        materialize(checkpoint.model(config, torch.float32))

    reasons = [reason_of(step) for step in (read_model, checkpoint.tokenizer)]
    for reason in reasons:
        assert reason is None or (reason.startswith(f"{path}: ") and "\n" not in reason)
    return reasons[0] or reasons[1]


def reason_of(step: Callable[[], object]) -> str | None:
    try:
        step()
    except ModelError as error:
        return str(error)
    return None


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A file with one to four mutations, mostly before the tensors' data: flipped and random bytes, cuts, large numbers, copies."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(min(len(changed), 3_000) if rng.random() < 0.9 else len(changed))
        kind = rng.randrange(5)
        if kind == 0:
            changed[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[place : place + 8] = rng.randbytes(8)
        elif kind == 2:
            changed[place : place + 8] = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
        elif kind == 3:
            del changed[place : place + rng.choice([1, 8, len(changed)])]
        else:
            source = rng.randrange(len(changed))
            changed[place:place] = changed[source : source + rng.randint(1, 40)]
        if not changed:
            break
    return bytes(changed)


def fuzz(data: bytes, path: Path, seeds: range) -> int:
    """Read mutated files. -> how many were refused"""
    return sum(refusal(mutated(data, random.Random(seed)), path) is not None for seed in seeds)


def test_mutated_files_are_read_or_refused(model_bytes: bytes, tmp_path: Path) -> None:
    assert fuzz(model_bytes, tmp_path / "model.gguf", range(40)) > 10


@pytest.mark.slow
def test_two_thousand_mutated_files_are_read_or_refused(model_bytes: bytes, tmp_path: Path) -> None:
    assert fuzz(model_bytes, tmp_path / "model.gguf", range(2_000)) > 500


def test_one_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_uint16("split.count", 3)
    finish(writer)
    with pytest.raises(ModelError, match="one of 3 parts"):
        GGUFCheckpoint(str(tmp_path / "model.gguf"), LoadOptions()).check(has_weights=True)
