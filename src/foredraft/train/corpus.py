"""Reads text files as documents, excludes some and holds some out."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from foredraft.errors import ForedraftError
from foredraft.utils.unicode import check_unicode

BENCHMARKS = ("mbpp", "mt_bench", "mt-bench", "mtbench", "spec_bench", "spec-bench", "humaneval")
"""Files with these names are refused: a draft trained on the prompts of a benchmark cannot be measured on it."""

SEPARATOR = "<|endoftext|>"


Document = TypeVar("Document")


class Pair(NamedTuple):
    """A source, and a text that answers it."""

    source: str
    text: str


@dataclass(frozen=True)
class SourceFile(Generic[Document]):
    """A file that was read. num_bytes: as stored, possibly compressed. digest: SHA-256 of these bytes, in hexadecimal. documents:
    texts or pairs."""

    path: Path
    num_bytes: int
    digest: str
    documents: tuple[Document, ...]


def read_file(
    path: Path, *, separator: str = SEPARATOR, separator_line: str | None = None, field: str = "text"
) -> SourceFile[str]:
    """Read one file, plain or gzipped (.gz), and cut it into documents; blank ones are dropped.

    separator: a string between documents. separator_line: a line that begins with it also ends a document, and is
    dropped. In .jsonl files every line is a document: the string in `field`.

    Raises ForedraftError with the file's name if it cannot be read, is not UTF-8, or belongs to a benchmark.
    """
    raw, text = _content(path)
    if _is_jsonl(path):
        parts = [record for (record,) in _json_fields(path, text, (field,))]
    else:
        parts = list(_split(text, separator, separator_line))
    documents = tuple(document for document in parts if document.strip())
    return _source_file(path, raw, documents)


def read_pairs(path: Path, *, field: str = "text") -> SourceFile[Pair]:
    """Read one file, plain or gzipped (.gz), of sources and texts: one pair per line with a tab between the two, or in .jsonl files
    one record per line with the strings "source" and `field`.

    Raises ForedraftError as read_file does, and for a line that is not a pair.
    """
    raw, text = _content(path)
    if _is_jsonl(path):
        pairs = [Pair(*record) for record in _json_fields(path, text, ("source", field))]
    else:
        pairs = list(_tabbed(path, text))
    return _source_file(path, raw, tuple(pair for pair in pairs if pair.source.strip() and pair.text.strip()))


def _source_file(path: Path, raw: bytes, documents: tuple[Document, ...]) -> SourceFile[Document]:
    return SourceFile(path, len(raw), hashlib.sha256(raw).hexdigest(), documents)


def _content(path: Path) -> tuple[bytes, str]:
    """-> a file's bytes as stored, and its text"""
    _refuse_benchmarks(path)
    try:
        raw = path.read_bytes()
        content = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ForedraftError(f"{path}: not a valid gzip file: {error}") from None
    except OSError as error:
        raise ForedraftError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        return raw, content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ForedraftError(
            f"{path} is not UTF-8 text: byte {error.start} cannot be decoded; convert it to UTF-8 first"
        ) from None


def _is_jsonl(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith(".jsonl")


def _refuse_benchmarks(path: Path) -> None:
    for name in BENCHMARKS:
        if name in path.name.lower():
            raise ForedraftError(
                f"{path}: {name} is a benchmark: a draft must not be trained on what it is measured on"
            )


def _json_fields(path: Path, text: str, fields: Sequence[str]) -> Iterator[list[str]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ForedraftError(f"{path}, line {number}: not valid JSON ({error})") from None
        found = [record.get(field) for field in fields] if isinstance(record, dict) else []
        values = [value for value in found if isinstance(value, str)]
        if len(values) < len(fields):
            wanted = " and a string ".join(f'"{field}"' for field in fields)
            raise ForedraftError(f"{path}, line {number}: must be an object with a string {wanted}")
        for field, value in zip(fields, values, strict=True):
            check_unicode(f'{path}, line {number}: "{field}"', value)
        yield values


def _tabbed(path: Path, text: str) -> Iterator[Pair]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        parts = line.removesuffix("\r").split("\t")
        if len(parts) != 2:
            raise ForedraftError(f"{path}, line {number}: must be a source and a text, separated by one tab")
        yield Pair(*parts)


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
    """The documents that are not among the excluded ones. White space at their ends is ignored."""
    removed = {document.strip() for document in excluded}
    return [document for document in documents if document.strip() not in removed]


def split_held_out(documents: Sequence[str], share: float) -> tuple[list[str], list[str]]:
    """-> (training, held out): roughly this share of the documents is held out, by a hash of their content. So the same text is
    always on the same side, even if it occurs twice."""
    train: list[str] = []
    validation: list[str] = []
    for document in documents:
        (validation if _position(document) < share else train).append(document)
    return train, validation


def split_held_out_pairs(pairs: Iterable[Pair], share: float) -> tuple[list[Pair], list[Pair]]:
    """Like split_held_out, by source: all pairs with the same source are on the same side."""
    train: list[Pair] = []
    validation: list[Pair] = []
    for pair in pairs:
        (validation if _position(pair.source) < share else train).append(pair)
    return train, validation


def _position(text: str) -> float:
    """A hash of the text, from 0 to below 1."""
    return int.from_bytes(hashlib.sha256(text.strip().encode()).digest()[:8], "big") / 2**64
