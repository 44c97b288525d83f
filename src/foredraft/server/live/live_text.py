"""A text on the live page, while it is generated."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from foredraft.engine.sequence import TokenSequence
from foredraft.server.live.ring_buffer import RingBuffer
from foredraft.trace.round_lines import TokenDecoder

_MAX_TOKENS = 2000
"""The number of tokens of a text that are kept, its last ones."""
_MAX_TOKENS_PER_READ = 1024
"""Tokens of a text that are decoded at a time: as many as a fast pair of models generates in a seventh of a second. If there are
more, the older ones are skipped."""
_PROMPT_TOKENS = 200
_CONTEXT_TOKENS = 64


class LiveText:
    """The last tokens of a sequence, with their characters and origins.

    show_text: whether ids and characters are included. tokenizer: None leaves the characters out.
    """

    def __init__(self, sequence: TokenSequence, *, show_text: bool, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.sequence = sequence
        self.num_read = 0
        self.is_ended = False
        self._show_text = show_text
        self._tokenizer = tokenizer if show_text else None
        self._tokens: RingBuffer[tuple[int, str, int]] = RingBuffer(_MAX_TOKENS)
        self._decoder = self._decoder_at(sequence.prompt_len)
        self._prompt = self._decoded_prompt()

    def read(self) -> None:
        """Read the tokens that were generated since the last call."""
        sequence = self.sequence
        is_ended = sequence.is_finished
        num_output = sequence.num_output
        begin = sequence.prompt_len + self.num_read
        end = sequence.prompt_len + num_output
        if end - begin > _MAX_TOKENS_PER_READ:
            begin = end - _MAX_TOKENS_PER_READ
            self._decoder = self._decoder_at(begin)
            self._tokens.skip_to(begin - sequence.prompt_len)
        ids = sequence.tokens[begin:end]
        origins = sequence.origins[begin - sequence.prompt_len : num_output]
        for token, characters, origin in zip(ids, self._decoder.push(ids), origins, strict=True):
            self._tokens.append((token if self._show_text else 0, characters, int(origin)))
        self.num_read = num_output
        self.is_ended = is_ended

    def update(self, known: tuple[int, bool] | None) -> dict[str, Any] | None:
        """What is new for a watcher, as JSON; None if nothing is.

        known: how many tokens the watcher has and whether it knows that the text ended; None if the text is new to it.
        """
        if known == (self.num_read, self.is_ended):
            return None
        sequence, stats = self.sequence, self.sequence.stats
        tokens = self._tokens.since(known[0] if known else 0)
        until = sequence.last_token_at or sequence.arrived_at
        fields: dict[str, Any] = {
            "id": sequence.seq_id,
            "at": self.num_read - len(tokens),
            "tokens": tokens,
            "num_tokens": self.num_read,
            "seconds": round(until - sequence.arrived_at, 4),
            "num_spec_steps": stats.num_spec_steps,
            "num_accepted_tokens": stats.num_accepted_tokens,
            "num_evaluated_tokens": stats.num_evaluated_tokens,
            "finish_reason": sequence.finish_reason if self.is_ended else None,
            "is_ended": self.is_ended,
        }
        if known is None:
            fields["prompt"] = self._prompt
            fields["num_prompt_tokens"] = len(sequence.prompt_ids)
        return fields

    def _decoder_at(self, position: int) -> TokenDecoder:
        """A decoder for the tokens from this position on."""
        context = self.sequence.tokens[max(0, position - _CONTEXT_TOKENS) : position]
        return TokenDecoder(self._tokenizer, context)

    def _decoded_prompt(self) -> str | None:
        """The end of the prompt."""
        if self._tokenizer is None:
            return None
        ids = self.sequence.prompt_ids
        text = str(self._tokenizer.decode(ids[-_PROMPT_TOKENS:]))
        return f"…{text}" if len(ids) > _PROMPT_TOKENS else text
