"""Text coloured by where its tokens came from."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from foredraft.cli.render.console import visible
from foredraft.engine.sequence import Origin
from foredraft.text.detokenizer import IncrementalDecoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from foredraft.text.outputs import CompletionOutput

STYLES = {Origin.PLAIN: "default", Origin.ACCEPTED: "green", Origin.RECOVERED: "red", Origin.BONUS: "blue"}
NAMES = {
    Origin.ACCEPTED: "accepted draft token",
    Origin.RECOVERED: "recovered token",
    Origin.BONUS: "bonus token",
    Origin.PLAIN: "plain token (no draft)",
}

Piece = tuple[str, Origin]


class OriginPieces:
    """Splits a stream of text at token boundaries and labels each piece with its origin.

    Text may arrive later than its tokens (unfinished characters, possible stop strings). So each token is decoded once
    more to find out how many characters it adds, and characters are assigned in that order.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens, prompt_ids=prompt_ids)
        self._runs: deque[tuple[int, Origin]] = deque()
        self._last = Origin.PLAIN

    def split(self, text: str, token_ids: Sequence[int], origins: Sequence[Origin]) -> list[Piece]:
        """The pieces of `text`. token_ids, origins: of the tokens that came with it."""
        for token_id, origin in zip(token_ids, origins, strict=True):
            self._runs.append((len(self._decoder.push(token_id)), origin))
        pieces = []
        while text and self._runs:
            length, self._last = self._runs.popleft()
            if length > len(text):
                self._runs.appendleft((length - len(text), self._last))
            if length:
                pieces.append((text[:length], self._last))
            text = text[length:]
        # the end of a text may have more characters than its tokens gave: one that was never finished
        return [*pieces, (text, self._last)] if text else pieces


def pieces_of(text: CompletionOutput, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> list[Piece]:
    """The pieces of a whole text."""
    return OriginPieces(tokenizer, prompt_ids).split(text.text, text.token_ids, text.origins)


def write_pieces(console: Console, pieces: Iterable[Piece]) -> None:
    """Write and flush: coloured on a terminal, the bare text anywhere else."""
    for piece, origin in pieces:
        if console.is_terminal:
            console.out(visible(piece), style=STYLES[origin], end="", highlight=False)
        else:
            console.file.write(piece)
    console.file.flush()


def legend(origins: Iterable[Origin]) -> Text:
    """What the colours mean, and how many tokens have each."""
    counts = Counter(origins)
    line = Text()
    for origin, name in NAMES.items():
        if counts[origin]:
            line.append("  " if line else "")
            line.append(f"■ {name} ({counts[origin]})", style=STYLES[origin])
    return line
