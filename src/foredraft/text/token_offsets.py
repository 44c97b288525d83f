"""Where the tokens of a text begin in it."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from foredraft.text.detokenizer import IncrementalDecoder, common_prefix_len


class TokenOffsets:
    """The offset of each token in the text that follows the prompt, in characters.

    A token that continues a character begins where that character does, and one that adds no text where the text so far ends. An
    offset never changes, so tokens that a stop string cuts off keep theirs, at or beyond the end of the text.
    """

    __slots__ = ("_decoder", "_num_released", "_offsets")

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens, prompt_ids=prompt_ids)
        self._num_released = 0  # characters that can no longer change
        self._offsets: list[int] = []

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """token_ids: all tokens so far, which may only grow from one call to the next."""
        for token_id in token_ids[len(self._offsets) :]:
            self._offsets.append(max(self._read(token_id), self._offsets[-1] if self._offsets else 0))
        return self._offsets[: len(token_ids)]

    def _read(self, token_id: int) -> int:
        num_whole, before = self._num_released + len(self._decoder.tail), self._decoder.unreleased
        piece = self._decoder.push(token_id)
        after = piece + self._decoder.unreleased
        num_same, begin = common_prefix_len(before, after), self._num_released
        self._num_released += len(piece)
        return begin + num_same if len(after) > num_same else num_whole
