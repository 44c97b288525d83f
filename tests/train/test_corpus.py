"""Which documents are read from files, and which are not."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft import ForedraftError
from foredraft.train.corpus import BENCHMARKS, exclude, read_file, read_pairs, split_held_out


def test_separators_and_lines_end_documents(tmp_path: Path) -> None:
    file = tmp_path / "code.txt"
    file.write_text("# == one.py\na = 1\n\n# == two.py\nb = 2<|endoftext|>\nc\n# == empty.py\n\n")
    assert read_file(file, separator_line="# == ").documents == ("a = 1", "b = 2", "c")
    assert read_file(file, separator="", separator_line=None).documents == (file.read_text().strip("\n"),)


def test_gzip_files_are_read_like_their_contents(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.txt", tmp_path / "a.txt.gz"
    plain.write_text("eins<|endoftext|>zwei")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_file(packed).documents == read_file(plain).documents == ("eins", "zwei")


def test_json_lines_are_documents(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"body": text}) for text in ("one\ntwo", "three")) + "\n")
    assert read_file(file, field="body").documents == ("one\ntwo", "three")
    with pytest.raises(ForedraftError, match=r'a\.jsonl, line 1: must be an object with a string "text"'):
        read_file(file)
    file.write_text('{"text": ')
    with pytest.raises(ForedraftError, match=r"line 1: not valid JSON"):
        read_file(file)


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path: Path) -> None:
    for name, content in (("a.txt", "Grüße"), ("a.jsonl", '{"text": "Grüße"}')):
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
        assert read_file(tmp_path / name).documents == ("Grüße",)


def test_lone_surrogates_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "fine", "source": "a"}\n{"text": "hello \\ud83d world", "source": "b"}\n')
    for read in (read_file, read_pairs):
        with pytest.raises(ForedraftError, match=r'a\.jsonl, line 2: "text" must be valid Unicode: .* at character 6$'):
            read(file)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes("Grüße".encode("latin-1"))
    with pytest.raises(ForedraftError, match=r"latin\.txt is not UTF-8 text: byte 2"):
        read_file(file)
    with pytest.raises(ForedraftError, match=r"nowhere\.txt: cannot be read"):
        read_file(tmp_path / "nowhere.txt")
    for name, content in (("cut.gz", gzip.compress(b"some text")[:-6]), ("no.gz", b"plain")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ForedraftError, match="not a valid gzip file"):
            read_file(tmp_path / name)


@pytest.mark.parametrize("name", ["mbpp.jsonl", "MT_Bench.jsonl", "my-mt-bench.txt.gz", "spec_bench.txt"])
def test_benchmarks_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("text")
    with pytest.raises(ForedraftError, match="is a benchmark"):
        read_file(tmp_path / name)


def test_no_recipe_trains_on_a_benchmark() -> None:
    recipes = [path for path in (Path(__file__).parents[2] / "recipes").iterdir() if path.is_file()]
    assert recipes
    for recipe in recipes:
        text = recipe.read_text().lower()
        assert not [name for name in BENCHMARKS if name in text], recipe


@given(st.lists(st.text(min_size=1), max_size=30), st.floats(0.0, 1.0))
def test_the_split_is_disjoint_and_loses_nothing(documents: list[str], share: float) -> None:
    train, rest = split_held_out(documents, share)
    assert sorted(train + rest) == sorted(documents)
    assert not {one.strip() for one in train} & {one.strip() for one in rest}


def test_the_held_out_share_is_about_the_requested_one() -> None:
    """By the binomial distribution it is outside 0.07 to 0.13 of 4,000 in one of 10^9 sets of documents; these are fixed."""
    _, rest = split_held_out([f"document {i}" for i in range(4000)], 0.1)
    assert 0.07 < len(rest) / 4000 < 0.13


def test_excluded_documents_are_left_out_anywhere() -> None:
    assert exclude(["a", "b\n", " c"], ["b", "c\n"]) == ["a"]
