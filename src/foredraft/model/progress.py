"""Progress bars on standard error while a model loads, only if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from tqdm import tqdm
from transformers import PreTrainedModel

from foredraft.model.structure import find_layers

T = TypeVar("T")


def with_bar(items: Sequence[T], description: str) -> Iterable[T]:
    """The same items, with a progress bar."""
    bar: Iterable[T] = _bar(description, items, total=len(items))
    return bar


@contextmanager
def bar_of_layers(hf: PreTrainedModel, description: str) -> Iterator[None]:
    """A progress bar for a pass by the library's own code. Files are memory-mapped, so this pass is what reads them."""
    layers = find_layers(hf) or ()
    bar = _bar(description, total=len(layers))

    def tick(*_: object) -> None:  # a hook's return value would replace the layer's output
        bar.update()

    handles = [layer.register_forward_hook(tick) for layer in layers]
    try:
        yield
    finally:
        bar.close()
        for handle in handles:
            handle.remove()


def _bar(description: str, items: Sequence[Any] | None = None, *, total: int) -> Any:
    # a program that draws on the terminal itself has replaced sys.stderr
    stream = sys.stderr
    is_ours = stream is not None and stream.isatty() and stream is sys.__stderr__
    return tqdm(items, desc=description, total=total, leave=False, disable=not is_ours)
