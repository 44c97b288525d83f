"""There is one library for each source, compiler and set of flags, and a one-line reason if there can be none."""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.kernels import AttentionShape, build, start
from foredraft.kernels.build import BuildError, library
from foredraft.kernels.native import Kernels


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake compiler that counts its calls in a file beside it, and compiles nothing."""
    script = tmp_path / "fake-c++"
    script.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo one; exit 0; fi\n'
        f"echo x >> {tmp_path}/calls\n"
        'while [ "$1" != -o ]; do shift; done; echo library > "$2"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(script))
    return script


@pytest.fixture
def _fresh_outcome() -> Iterator[None]:
    """load_kernels caches its result, which must not last beyond a test."""
    known = start._outcome
    start._outcome.cache_clear()
    yield
    start._outcome = known
    start._outcome.cache_clear()


def num_calls(compiler: Path) -> int:
    log = compiler.parent / "calls"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_a_library_is_compiled_once_and_leaves_no_other_file(compiler: Path, tmp_path: Path) -> None:
    cache = tmp_path / "deep" / "cache"
    built = library("avx2", cache)
    before = built.stat().st_mtime_ns
    assert library("avx2", cache) == built
    assert built.stat().st_mtime_ns == before
    assert list(cache.iterdir()) == [built]
    assert num_calls(compiler) == 1
    assert stat.S_IMODE(cache.stat().st_mode) & 0o022 == 0


def test_the_librarys_name_depends_on_source_flags_and_compiler(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [library("avx2", tmp_path / "cache").name]
    with monkeypatch.context() as patch:
        patch.setattr(build, "_FLAGS", (*build._FLAGS, "-DOTHER"))
        names.append(library("avx2", tmp_path / "cache").name)
    with monkeypatch.context() as patch:
        other = shutil.copytree(build.SOURCES, tmp_path / "other")
        with (other / "base.h").open("a") as header:
            header.write("\n")
        patch.setattr(build, "SOURCES", other)
        names.append(library("avx2", tmp_path / "cache").name)
    names.append(library("avx512", tmp_path / "cache").name)
    compiler.write_text(compiler.read_text().replace("echo one", "echo two"))
    names.append(library("avx2", tmp_path / "cache").name)
    assert len(set(names)) == 5
    assert num_calls(compiler) == 5


def test_the_librarys_name_depends_on_every_included_file(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them are beside kernels.cpp, so that they are packaged, and a change to any of them causes a rebuild."""
    text = "".join(path.read_text() for path in [*build.SOURCES.glob("*.h"), *build.SOURCES.glob("*.cpp")])
    included = set(re.findall(r'#include "(.+)"', text))
    names = {library("avx2", tmp_path / "cache").name}
    monkeypatch.setattr(build, "SOURCES", shutil.copytree(build.SOURCES, tmp_path / "other"))
    for file in included:
        with (build.SOURCES / file).open("a") as header:
            header.write("\n")
        names.add(library("avx2", tmp_path / "cache").name)
    assert len(included) > 8
    assert len(names) == 1 + len(included)


def test_the_users_cache_is_where_xdg_says(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert library("avx2").parent == tmp_path / "xdg" / "foredraft"


def test_with_an_unwritable_cache_the_next_folder_is_used(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    assert library("avx2").parent == tmp_path / "tmp" / f"foredraft-{os.getuid()}"
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path / "file"))
    with pytest.raises(BuildError, match="XDG_CACHE_HOME"):
        library("avx2")


def test_another_users_library_is_not_loaded(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = library("avx2", tmp_path / "cache")
    monkeypatch.setattr(build.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(BuildError):
        library("avx2", built.parent)


@pytest.mark.usefixtures("_fresh_outcome")
def test_without_a_compiler_there_is_one_line_and_no_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    with pytest.raises(BuildError, match="install g") as caught:
        library("avx2")
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(start, "usable_instructions", lambda: ["avx2"])
    with caplog.at_level(logging.WARNING, "foredraft"):
        assert start.load_kernels() is None
        assert start.load_kernels() is None
    assert start.why_none() == str(caught.value)
    assert len(caplog.records) == 1
    assert str(caught.value) in caplog.text


@pytest.mark.usefixtures("_fresh_outcome")
def test_if_an_instruction_set_cannot_be_built_the_next_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a compiler that is older than the processor."""
    usable = start.usable_instructions()

    def none_but_the_last(instructions: str) -> Path:
        if instructions != usable[-1]:
            raise BuildError(f"the compiler does not know {instructions}")
        return library(instructions)

    monkeypatch.setattr(start, "library", none_but_the_last)
    assert (start.load_kernels() is None) == (usable == [])


@pytest.mark.parametrize("complaint", ["kernels.cpp:1: error: no\nmore", "", "Segmentation fault"])
def test_a_compiler_that_fails_gives_one_line(compiler: Path, tmp_path: Path, complaint: str) -> None:
    compiler.write_text(f"#!/bin/sh\nprintf '%s' '{complaint}' >&2\nexit 1\n")
    cache = tmp_path / "cache"
    with pytest.raises(BuildError) as caught:
        library("avx2", cache)
    assert "\n" not in str(caught.value)
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("_fresh_outcome")
def test_an_invalid_library_gives_no_kernels(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(start, "usable_instructions", lambda: ["avx2"])
    assert start.load_kernels() is None
    assert "\n" not in (start.why_none() or "\n")


@pytest.mark.usefixtures("_fresh_outcome")
def test_a_user_without_a_home_gets_kernels_or_a_reason(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs with an arbitrary user id."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(build.Path, "home", homeless)
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(compiler.parent / "tmp"))
    monkeypatch.setattr(start, "usable_instructions", lambda: ["avx2"])
    assert start.load_kernels() is None
    assert start.why_none()


class Wrong:
    """Kernels with a fault."""

    def __init__(self, kernels: Kernels, *, is_exact: bool) -> None:
        self.pack = kernels.pack
        self._kernels, self._is_exact = kernels, is_exact

    def linear(self, matrix: object, x: torch.Tensor) -> torch.Tensor:
        out = self._kernels.linear(matrix, x)  # type: ignore[arg-type]
        return out + (0.5 if not self._is_exact or x.shape[0] == 5 else 0.0)


def test_the_self_test_passes_here_and_notices_faults(kernels: Kernels) -> None:
    assert start.self_test(kernels) is None
    assert "exact" in (start.self_test(Wrong(kernels, is_exact=False)) or "")  # type: ignore[arg-type]
    assert "rows" in (start.self_test(Wrong(kernels, is_exact=True)) or "")  # type: ignore[arg-type]


class WrongInGroups(Wrong):
    """Kernels that are right only for weights without groups of inputs."""

    def linear(self, matrix: object, x: torch.Tensor) -> torch.Tensor:
        out = self._kernels.linear(matrix, x)  # type: ignore[arg-type]
        return out + (0.5 if matrix.layout.group else 0.0)  # type: ignore[attr-defined]


def test_the_self_test_covers_groups(kernels: Kernels) -> None:
    reason = start.self_test(WrongInGroups(kernels, is_exact=True))  # type: ignore[arg-type]
    assert "groups of inputs" in (reason or "")


class Forgetful:
    """Kernels whose attention forgets a setting of its shape, or of its spans."""

    def __init__(self, kernels: Kernels, **defaults: Any) -> None:
        self.pack, self.linear = kernels.pack, kernels.linear
        self._kernels, self._of_shape = kernels, defaults
        self._of_span = {"num_seen": defaults.pop("num_seen")} if "num_seen" in defaults else {}

    def attend(self, spans: Any, query: torch.Tensor, shape: AttentionShape, num_rows: int) -> torch.Tensor:
        spans = [span._replace(**self._of_span) for span in spans]
        return self._kernels.attend(spans, query, shape._replace(**self._of_shape), num_rows)


@pytest.mark.parametrize(
    "defaults",
    [{"window": 0}, {"softcap": 0.0}, {"sinks": None}, {"scale": 0.1}, {"bias": None}, {"num_seen": 0}],
    ids=str,
)
def test_the_self_test_covers_what_families_need_of_attention(kernels: Kernels, defaults: dict[str, Any]) -> None:
    assert start.self_test(Forgetful(kernels)) is None  # type: ignore[arg-type]
    assert start.self_test(Forgetful(kernels, **defaults)) == "their attention is wrong here"  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("instructions", build.INSTRUCTIONS)
def test_the_real_compiler_makes_every_library(instructions: str, tmp_path: Path) -> None:
    """Also those that this processor cannot run. The one that it uses was already built for all tests."""
    is_made = start.load_kernels() is not None and instructions == start.usable_instructions()[0]
    assert (library(instructions) if is_made else library(instructions, tmp_path)).stat().st_size > 0


@pytest.mark.usefixtures("_fresh_outcome")
def test_the_fastest_available_instructions_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def flags(text: str) -> list[str]:
        monkeypatch.setattr(start.Path, "read_text", lambda _: f"model name : some\nflags\t\t: {text}\nbugs :\n")
        return start.usable_instructions()

    every = [flag for needed in start._NEEDED.values() for flag in needed]
    assert flags(" ".join(every)) == ["amx", "avx512", "avx2"]
    assert flags(" ".join(flag for flag in every if flag != "amx_bf16")) == ["avx512", "avx2"]
    assert flags(" ".join(flag for flag in every if flag != "avx512_bf16")) == ["avx2"]
    assert flags("sse4_2 avx avx2") == []
    assert start.load_kernels() is None
    assert "lacks avx2 or fma" in (start.why_none() or "")
