"""The state of a run on disk. It is complete at every moment, however the process ends.

    OUT/training.json            the arguments of the run
    OUT/log.jsonl                a line for every step
    OUT/checkpoints/step-NNN/    a Hugging Face folder (float32) and trainer.pt
    OUT/                         the finished model, in bfloat16

A folder is written under another name, synced to disk and renamed. Only then is the previous one removed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foredraft.errors import ForedraftError
from foredraft.train.run_arguments import difference

_FOLDER, _STEP, _PARTIAL = "checkpoints", "step-", ".partial-"
TRAINER, ARGUMENTS, LOG, MODEL_CARD = "trainer.pt", "training.json", "log.jsonl", "README.md"
_MOVED_LAST = ("config.json",)
"""Moved last, because nothing loads a folder without it."""


class RunFolder:
    """out: the folder of one run; it is created by begin(). Raises ForedraftError if it holds something else."""

    def __init__(self, out: Path) -> None:
        self.out = out
        if out.exists() and not out.is_dir():
            raise ForedraftError(f"{out} is a file: give --out a folder")
        if out.is_dir() and not (out / ARGUMENTS).exists() and not _is_only_begun(out):
            raise ForedraftError(f"{out} contains unrelated files: give --out a new folder or an empty one")

    def begin(self, arguments: dict[str, Any]) -> None:
        """Create the folder, remove partial files that a kill left, and write the arguments. A run that has left nothing to continue
        begins anew."""
        has_results = self._has_results()
        with writing(self.out):
            (self.out / _FOLDER).mkdir(parents=True, exist_ok=True)
            for partial in [*self.out.glob(f"{_PARTIAL}*"), *(self.out / _FOLDER).glob(f"{_PARTIAL}*")]:
                _remove(partial)
        if not has_results:
            self.write_text(ARGUMENTS, json.dumps(arguments, indent=1) + "\n")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training in the folder meanwhile. Raises ForedraftError if one does. A process that ends in any way
        gives up its lock. Without effect where the system has no such locks."""
        is_new = not self.out.exists()
        with writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        try:
            with _locked(self.out):
                yield
        finally:
            if is_new:
                with suppress(OSError):
                    self.out.rmdir()  # if nothing was written

    def _has_results(self) -> bool:
        """Whether there is anything to continue: a checkpoint, texts that the target has written, or other files."""
        others = (ARGUMENTS, LOG, _FOLDER)
        files = self.out.iterdir() if self.out.exists() else ()
        return bool(self.checkpoints) or any(
            path.name not in others and not path.name.startswith(_PARTIAL) for path in files
        )

    @property
    def checkpoints(self) -> list[Path]:
        """The folders of the checkpoints, oldest first."""
        return sorted((self.out / _FOLDER).glob(f"{_STEP}*"), key=lambda path: int(path.name.removeprefix(_STEP)))

    def check_arguments(self, arguments: dict[str, Any]) -> None:
        """Raises ForedraftError, naming the first argument that differs from those of the run in this folder, unless that run has left
        nothing to continue."""
        file = self.out / ARGUMENTS
        if not file.exists() or not self._has_results():
            return
        try:
            stored = json.loads(file.read_text())
        except ValueError:
            raise ForedraftError(f"{file}: cannot be read: remove the folder, or give another --out") from None
        given = json.loads(json.dumps(arguments))
        found = difference(stored, given)
        if found is not None:
            raise ForedraftError(
                f"{self.out} contains a run {found}: give the same arguments to continue it, or another --out"
            )

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Save a checkpoint atomically, and then remove the older ones."""
        final = self.out / _FOLDER / f"{_STEP}{step}"
        if final.exists():
            return final
        partial = final.with_name(f"{_PARTIAL}{step}")
        with writing(final), _removed_on_failure(partial):
            partial.mkdir()
            write(partial)
            _sync_folder(partial)
            partial.rename(final)
            _sync(final.parent)
        for old in self.checkpoints[:-1]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def publish(self, write: Callable[[Path], None]) -> None:
        """Write the finished model into the folder itself. It becomes loadable once the last file is there."""
        partial = self.out / f"{_PARTIAL}model"
        with writing(self.out), _removed_on_failure(partial):
            partial.mkdir()
            write(partial)
            _sync_folder(partial)
            for file in sorted(partial.iterdir(), key=lambda path: path.name in _MOVED_LAST):
                os.replace(file, self.out / file.name)
            partial.rmdir()
            _sync(self.out)

    def write_text(self, name: str, text: str) -> None:
        """Replace a file atomically."""
        partial = self.out / f"{_PARTIAL}{name}"
        with writing(self.out / name):
            try:
                partial.write_text(text, encoding="utf-8")
                _sync(partial)
                os.replace(partial, self.out / name)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # Windows has none
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ForedraftError(
            f"{folder}: another process is training there: wait for it, or give another --out"
        ) from None
    except OSError:
        pass  # the file system has none
    try:
        yield
    finally:
        os.close(handle)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn write errors, such as a full disk, into ForedraftError. Some libraries raise them as their own exceptions."""
    try:
        yield
    except ForedraftError:
        raise
    except OSError as error:
        raise ForedraftError(
            f"{path}: cannot be written: {error.strerror or error}; what was saved earlier is kept"
        ) from None
    except Exception as error:
        if type(error).__name__ not in ("SafetensorError", "RuntimeError"):
            raise
        lines = str(error).strip().splitlines()
        raise ForedraftError(
            f"{path}: cannot be written: {lines[0] if lines else error}; what was saved earlier is kept"
        ) from error


@contextmanager
def _removed_on_failure(partial: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _is_only_begun(folder: Path) -> bool:
    """Whether there is nothing but what a run that was killed in its beginning leaves."""
    return all(
        path.name.startswith(_PARTIAL) or (path.name == _FOLDER and path.is_dir() and not any(path.iterdir()))
        for path in folder.iterdir()
    )


def _remove(path: Path) -> None:
    """A file or a folder, if possible."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _sync_folder(folder: Path) -> None:
    for file in folder.iterdir():
        _sync(file)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_trainer(checkpoint: Path) -> dict[str, Any]:
    """The content of a checkpoint's trainer.pt."""
    state: dict[str, Any] = torch.load(checkpoint / TRAINER, map_location="cpu", weights_only=True)
    return state
