"""The text of one sequence as it is generated, and the stop rule that ends it at a stop string.

The engine never sees text: it calls a stop rule, a function from new ids to the number of them to keep.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from foredraft.sampling.params import SamplingParams
from foredraft.text.detokenizer import IncrementalDecoder
from foredraft.text.stop_strings import StopStrings


class TextStream:
    """The text of one sequence, for its caller to read, and its stop rule, which the engine calls.

    stop: strings that end the text. The one that completes first ends it: at the earliest token; within that token
        the one that begins first; of several that begin there, the shortest. A string that completes among the first
        min_tokens output tokens is ignored.
    include_stop_str_in_output: the text ends after the stop string instead of before it.

    `stop_reason` is the string that ended the text, or None.
    """

    __slots__ = (
        "_decoder",
        "_held",
        "_include_stop",
        "_is_finished",
        "_min_tokens",
        "_num_seen",
        "_num_streamed",
        "_pieces",
        "_stop",
        "_undecoded",
        "stop_reason",
    )

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.stop_reason: str | None = None
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens, prompt_ids=prompt_ids)
        self._stop = StopStrings(stop)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._is_finished = False
        self._undecoded: list[int] = []  # without stop strings, ids are decoded only when somebody reads the text
        self._pieces: list[str] = []  # the text, all of it final
        self._num_seen = 0  # pieces that delta has seen
        self._held = ""  # the part of them that delta held back
        self._num_streamed = 0  # characters that delta returned

    @classmethod
    def for_request(
        cls, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], params: SamplingParams
    ) -> TextStream:
        """The stream of one text of a request."""
        return cls(
            tokenizer,
            prompt_ids=prompt_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def __call__(self, new_ids: Sequence[int], num_output_before: int) -> int | None:
        """The stop rule. -> None to go on, or how many of the ids to keep, the last of which completed a stop string

        new_ids follow the num_output_before ids of earlier calls. After a stop nothing is kept.
        """
        if self._is_finished:
            return 0
        if not self._stop:
            self._undecoded.extend(new_ids)
            return None
        if len(new_ids) > 1 and self._read_block(new_ids):
            return None
        for i, token_id in enumerate(new_ids):
            piece = self._decoder.push(token_id)
            if self._add(piece, may_stop=num_output_before + i >= self._min_tokens):
                return i + 1
        return None

    @property
    def text(self) -> str:
        """The text so far, whole characters only; all of it once it is finished or a stop string has ended it."""
        self._decode_rest()
        return "".join(self._pieces)

    def delta(self, finished: bool = False) -> str:
        """The text since the last call, without an end that might become a stop string; all of it when finished."""
        if finished:
            self.finish()
        self._decode_rest()
        new = self._held + "".join(self._pieces[self._num_seen :])
        self._num_seen = len(self._pieces)
        is_ambiguous = not (self._is_finished or self._include_stop)
        num_released = len(new) - (self._stop.num_ambiguous(new) if is_ambiguous else 0)
        self._held = new[num_released:]
        self._num_streamed += num_released
        return new[:num_released]

    def finish(self) -> str:
        """End the text, for whatever reason the engine had. -> the whole text"""
        if not self._is_finished:
            self._decode_rest()
            self._append(self._decoder.flush())
            self._is_finished = True
        return self.text

    def _decode_rest(self) -> None:
        if self._undecoded:
            ids, self._undecoded = self._undecoded, []
            self._append(self._decoder.extend(ids))

    def _append(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)

    def _read_block(self, new_ids: Sequence[int]) -> bool:
        """Decode all ids at once. False, and no state changes, if a stop string may complete among them."""
        if not self._decoder.is_append_only(new_ids):
            return False
        before = self._decoder.clone()
        piece = self._decoder.extend(new_ids)
        tail = self._decoder.tail
        if self._stop.find(piece, tail) is not None:
            self._decoder = before
            return False
        self._go_on(piece, tail)
        return True

    def _add(self, piece: str, *, may_stop: bool) -> bool:
        """Add the piece of one token. -> whether a stop string completed with it and ended the text"""
        tail = self._decoder.tail
        hit = self._stop.find(piece, tail) if may_stop else None
        if hit is None:
            self._go_on(piece, tail)
            return False
        offset, stop = hit
        self.stop_reason, self._is_finished = stop, True
        self._cut(piece + tail, offset + (len(stop) if self._include_stop else 0))
        return True

    def _go_on(self, piece: str, tail: str) -> None:
        self._append(piece)
        self._stop.advance(piece, tail)

    def _cut(self, fresh: str, offset: int) -> None:
        """End the text at an offset into fresh (below 0: before it)."""
        before = self.text
        final = (before + fresh)[: len(before) + offset]
        self._pieces, self._num_seen = [final], 1
        self._held = final[self._num_streamed :]
