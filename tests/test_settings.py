"""Settings files: they are read as written, arguments override them, and unknown entries are refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from foredraft import LLM, ForedraftError
from foredraft.drafters import ScriptedDrafter
from foredraft.settings import Settings

names = st.text(min_size=1, max_size=20).filter(lambda text: text.isprintable())
numbers = st.integers(1, 100)
any_settings = st.builds(
    Settings,
    model=st.none() | names,
    draft_model=st.none() | names,
    method=st.none() | names,
    speculative_tokens=st.none() | st.integers(0, 20) | st.just("auto"),
    max_speculative_tokens=st.none() | numbers,
    quantization=st.none() | st.sampled_from(["int8", "int4", "int4-all"]),
    draft_quantization=st.none() | st.just("none"),
    num_threads=st.none() | numbers,
    heterogeneous_vocab=st.none() | st.sampled_from(["auto", "slem", "tli", "none"]),
    adapt=st.none() | st.booleans(),
    head_window=st.none() | st.integers(0, 4096),
    head_settings=st.none()
    | st.fixed_dictionaries({"taps": st.lists(numbers, max_size=3), "norm_output": st.booleans()}),
    draft_server=st.none() | names | st.fixed_dictionaries({"address": names, "max_wait": st.floats(0.1, 1)}),
)


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(any_settings)
def test_settings_are_read_as_written(tmp_path: Path, settings: Settings) -> None:
    file = tmp_path / "foredraft.toml"
    settings.write(file, {"speedup": 1.5, "interval": [1.2, 1.8], "draft": None, "text": 'with "quotes"'})
    assert Settings.read(file) == settings


@given(any_settings, any_settings)
def test_arguments_override_the_file(file: Settings, given_: Settings) -> None:
    arguments = {name: getattr(given_, name) for name in Settings.__slots__}
    found = file.override(**arguments)
    for name, value in arguments.items():
        assert getattr(found, name) == (getattr(file, name) if value is None else value)


BAD = {
    "unknown key": ('methd = "suffix"', ("methd", "method")),
    "unknown table": ('[models]\ntarget = "x"', ("models",)),
    "no TOML": ("method = suffix", ("TOML",)),
    "wrong kind": ("method = 3", ("method", "string", "3")),
    "a truth": ("speculative_tokens = true", ("speculative_tokens", "True")),
    "no table": ("head_settings = true", ("head_settings", "table", "True")),
    "no truth": ('adapt = "yes"', ("adapt", "true or false", "yes")),
    "a number as a string": (
        'speculative_tokens = "4"',
        ("speculative_tokens must be a whole number or \"auto\", not '4'",),
    ),
    "a tree as a string": (
        'speculative_token_tree = "[[0]]"',
        ('speculative_token_tree must be a list or "auto" or "none", not',),
    ),
    "a fraction": ("speculative_tokens = 1.5", ("speculative_tokens", "1.5")),
}


@pytest.mark.parametrize(("text", "words"), BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_refused_by_name(text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(ForedraftError) as error:
        LLM(config=file)
    for word in (str(file), *words):
        assert word in str(error.value)


def test_a_missing_file_and_invalid_utf8_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ForedraftError, match="cannot be read"):
        LLM(config=tmp_path / "nowhere.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ForedraftError, match="not valid TOML"):
        LLM(config=tmp_path / "bytes.toml")


def test_unwritable_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ForedraftError, match="ScriptedDrafter"):
        Settings(method=ScriptedDrafter(lambda request: [])).write(tmp_path / "foredraft.toml")
    with pytest.raises(ForedraftError, match="cannot be written"):
        Settings(method="suffix").write(tmp_path / "nowhere" / "foredraft.toml")


def test_an_llm_uses_the_file_and_arguments_override_it(tmp_path: Path) -> None:
    file = tmp_path / "foredraft.toml"
    Settings(method="suffix", speculative_tokens=5, num_threads=1).write(file, {"speedup": 1.5})
    llm = LLM(config=file)
    assert (llm.method, llm.speculative_tokens) == ("suffix", 5)
    llm = LLM(config=file, method="ngram", speculative_tokens="auto")
    assert (llm.method, llm.speculative_tokens) == ("ngram", "auto")


def test_bad_values_in_a_file_are_refused_like_bad_arguments(tmp_path: Path) -> None:
    file = tmp_path / "foredraft.toml"
    for text, words in (('method = "magic"', "magic"), ("speculative_tokens = -1", "at least 0")):
        file.write_text(text)
        with pytest.raises(ForedraftError, match=words):
            LLM(config=file)


def test_the_embedded_draft_comes_with_every_method_that_asks_for_it(tmp_path: Path) -> None:
    file = tmp_path / "foredraft.toml"
    Settings(method="draft_model+suffix", num_threads=1).write(file)
    assert LLM(config=file).method == "draft_model+suffix"
