"""Reads text files as documents, excludes some and holds some out."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from foredraft.errors import ForedraftError

BENCHMARKS = ("mbpp", "mt_bench", "mt-bench", "mtbench", "spec_bench", "spec-bench", "humaneval")
"""Files with these names are refused: a draft that was trained on the prompts of a benchmark cannot be measured on it."""

SEPARATOR = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that was read. num_bytes: as stored, perhaps compressed. digest: SHA-256 of these bytes, in hexadecimal."""

    path: Path
    num_bytes: int
    digest: str
    documents: tuple[str, ...]


def read_file(
    path: Path, *, separator: str = SEPARATOR, separator_line: str | None = None, field: str = "text"
) -> SourceFile:
    """One file, plain or gzipped (.gz), cut into documents; blank ones are dropped.

    separator: a string between documents. separator_line: a line that begins with it also ends a document, and is
    dropped. In .jsonl files every line is a document: the string in `field`.

    Raises ForedraftError with the file's name if it cannot be read, is not UTF-8, or belongs to a benchmark.
    """
    _refuse_benchmarks(path)
    try:
        raw = path.read_bytes()
        content = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ForedraftError(f"{path}: no sound gzip file: {error}") from None
    except OSError as error:
        raise ForedraftError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ForedraftError(
            f"{path} is no UTF-8 text: byte {error.start} cannot be decoded; convert it to UTF-8 first"
        ) from None
    if path.name.removesuffix(".gz").endswith(".jsonl"):
        parts = list(_json_fields(path, text, field))
    else:
        parts = list(_split(text, separator, separator_line))
    documents = tuple(document for document in parts if document.strip())
    return SourceFile(path, len(raw), hashlib.sha256(raw).hexdigest(), documents)


def _refuse_benchmarks(path: Path) -> None:
    for name in BENCHMARKS:
        if name in path.name.lower():
            raise ForedraftError(f"{path}: {name} is a benchmark, and no draft is trained on what it is measured on")


def _json_fields(path: Path, text: str, field: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ForedraftError(f"{path}, line {number}: no JSON ({error})") from None
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            raise ForedraftError(f'{path}, line {number}: needs an object with a string "{field}"')
        yield record[field]


def _split(text: str, separator: str, separator_line: str | None) -> Iterator[str]:
    for part in text.split(separator) if separator else [text]:
        if separator_line is None:
            yield part.strip("\n")
            continue
        lines: list[str] = []
        for line in part.splitlines(keepends=True):
            if line.startswith(separator_line):
                yield "".join(lines).strip("\n")
                lines = []
            else:
                lines.append(line)
        yield "".join(lines).strip("\n")


def exclude(documents: Iterable[str], excluded: Iterable[str]) -> list[str]:
    """The documents that are not among the excluded ones. White space at the ends does not matter."""
    removed = {document.strip() for document in excluded}
    return [document for document in documents if document.strip() not in removed]


def split_held_out(documents: Sequence[str], share: float) -> tuple[list[str], list[str]]:
    """-> (training, held out): about this share of the documents is held out, by a hash of their content. So the same text is
    always on the same side, even if it occurs twice."""
    train: list[str] = []
    validation: list[str] = []
    for document in documents:
        position = int.from_bytes(hashlib.sha256(document.strip().encode()).digest()[:8], "big") / 2**64
        (validation if position < share else train).append(document)
    return train, validation
