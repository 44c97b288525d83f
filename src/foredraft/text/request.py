"""A request: its prompt, its n sequences in the engine, and the outputs that its caller receives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from foredraft.engine.sequence import TokenLogprobs, TokenSequence
from foredraft.errors import RequestError, message_of
from foredraft.model import ModelInputs
from foredraft.sampling import SamplingParams
from foredraft.text.grammar import Grammar
from foredraft.text.outputs import CompletionOutput, Delta, Logprob, RequestMetrics, RequestOutput
from foredraft.text.stream import TextStream
from foredraft.text.token_offsets import TokenOffsets

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or, as in vLLM, {"prompt": text} or {"prompt_token_ids": ids}. For a model that reads audio:
{"input_features": features}, the output of its feature extractor for one recording. For an encoder-decoder,
"decoder_prompt_token_ids" may be added, if the decoder is to begin with other ids than its checkpoint specifies."""


@dataclass(slots=True)
class _Text:
    """One of the n texts of a request. offsets: None without a tokenizer, or if nobody asks for them. num_delivered: tokens that
    were delivered in deltas. is_closed: whether the last delta was delivered."""

    sequence: TokenSequence
    stream: TextStream | None
    offsets: TokenOffsets | None = None
    num_delivered: int = 0
    is_closed: bool = False

    @property
    def stop_reason(self) -> int | str | None:
        stop_string = self.stream.stop_reason if self.stream else None
        return self.sequence.stop_reason if stop_string is None else stop_string

    @property
    def characters(self) -> str:
        """The text so far; all of it once it is finished."""
        if self.stream is None:
            return ""
        return self.stream.finish() if self.sequence.is_finished else self.stream.text

    @property
    def has_delta(self) -> bool:
        """Whether there are new tokens, or the end of the text, to deliver."""
        return not self.is_closed and (self.sequence.num_output > self.num_delivered or self.sequence.is_finished)


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its n texts.

    prompt: None if it was given as ids or audio features. prompt_ids: for audio features, the ids that the decoder begins with.
    inputs: the model's inputs. failure: an error outside the steps of its sequences. client, priority: see TokenSequence.
    """

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    inputs: ModelInputs
    params: SamplingParams
    tokenizer: PreTrainedTokenizerBase | None
    bad_words: list[tuple[int, ...]]
    grammar: Grammar | None = None
    client: str = ""
    priority: int = 0
    texts: list[_Text] = field(default_factory=list)
    failure: Exception | None = None

    @property
    def sequences(self) -> list[TokenSequence]:
        return [text.sequence for text in self.texts]

    def add_text(self, sequence: TokenSequence, stream: TextStream | None) -> None:
        """Add the next of the n texts. stream: None without a tokenizer."""
        offsets = None
        if self.tokenizer is not None and self.params.logprobs is not None:
            skip, prompt_ids = self.params.skip_special_tokens, self.inputs.tokens
            offsets = TokenOffsets(self.tokenizer, skip_special_tokens=skip, prompt_ids=prompt_ids)
        self.texts.append(_Text(sequence, stream, offsets))

    @property
    def prompt_text(self) -> str:
        """The prompt as it was given; if it was given as ids, as the tokenizer decodes it."""
        if self.prompt is not None or self.tokenizer is None:
            return self.prompt or ""
        return str(self.tokenizer.decode(self.prompt_ids, skip_special_tokens=self.params.skip_special_tokens))

    @property
    def is_finished(self) -> bool:
        """Whether all sequences have finished; true before the first is added."""
        return all(sequence.is_finished for sequence in self.sequences)

    @property
    def error(self) -> str | None:
        """Why the request failed, in one line; None if it did not."""
        if self.failure is not None:
            return message_of(self.failure)
        return next((sequence.error for sequence in self.sequences if sequence.error), None)

    def fail(self, error: Exception) -> None:
        """Record an error that was raised outside the steps of its sequences, unless there was one before."""
        self.failure = self.failure or error

    def as_error(self, outputs: Sequence[RequestOutput] | None = None, prefix: str | None = None) -> RequestError:
        """The error of a failed request, for its caller. outputs: of the whole call; None: of this request. prefix: says which request
        failed; None: by its id."""
        outputs = [self.final_output()] if outputs is None else outputs
        prefix = f"request {self.request_id}: " if prefix is None else prefix
        error = RequestError(f"{prefix}{self.error}", list(outputs))
        error.__cause__ = self.failure or next((s.failure for s in self.sequences if s.failure), None)
        return error

    def deltas(self) -> list[Delta]:
        """What is new since the last call. The last delta of the request carries its output."""
        return [self._delta(index, text) for index, text in enumerate(self.texts) if text.has_delta]

    def _delta(self, index: int, text: _Text) -> Delta:
        sequence, begin = text.sequence, text.num_delivered
        characters = text.stream.delta(finished=sequence.is_finished) if text.stream else ""
        logprobs = self._logprobs(sequence.logprobs[begin:])
        offsets = self._text_offsets(text)
        text.num_delivered = sequence.num_output
        text.is_closed = sequence.is_finished
        return Delta(
            index=index,
            text=characters,
            token_ids=sequence.tokens[sequence.prompt_len + begin :],
            origins=sequence.origins[begin:],
            finish_reason=sequence.finish_reason,
            output=self.output() if all(t.is_closed for t in self.texts) else None,
            logprobs=logprobs,
            stop_reason=text.stop_reason if sequence.is_finished else None,
            text_offsets=None if offsets is None else offsets[begin:],
        )

    def output(self) -> RequestOutput:
        """The texts so far."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(self.prompt_ids),
            prompt_logprobs=self._prompt_logprobs(),
            outputs=[self._completion(index, text) for index, text in enumerate(self.texts)],
            finished=self.is_finished,
            metrics=RequestMetrics.of(self.sequences),
            prompt_text_offsets=self._prompt_text_offsets(),
        )

    def final_output(self) -> RequestOutput:
        """Like output, but never raises: if a text cannot be decoded, the request fails and its output has only the ids."""
        try:
            return self.output()
        except Exception as error:
            self.fail(error)
            outputs = [self._bare_completion(index, text.sequence) for index, text in enumerate(self.texts)]
            return RequestOutput(
                self.request_id,
                self.prompt,
                list(self.prompt_ids),
                None,
                outputs,
                self.is_finished,
                RequestMetrics.of(self.sequences),
            )

    def _bare_completion(self, index: int, sequence: TokenSequence) -> CompletionOutput:
        return CompletionOutput(
            index, "", sequence.output_ids, list(sequence.origins), None, None, "error", None, error=self.error
        )

    def _completion(self, index: int, text: _Text) -> CompletionOutput:
        sequence = text.sequence
        logprobs = self._logprobs(sequence.logprobs)
        return CompletionOutput(
            index=index,
            text=text.characters,
            token_ids=sequence.output_ids,
            origins=list(sequence.origins),
            cumulative_logprob=sum(entry.logprob for entry in sequence.logprobs) if logprobs is not None else None,
            logprobs=logprobs,
            finish_reason=sequence.finish_reason,
            stop_reason=text.stop_reason,
            error=sequence.error,
            text_offsets=self._text_offsets(text),
        )

    def _text_offsets(self, text: _Text) -> list[int] | None:
        """Of all tokens of a text; 0 without a tokenizer, since there is no text."""
        if self.params.logprobs is None:
            return None
        ids = text.sequence.output_ids
        return [0] * len(ids) if text.offsets is None else text.offsets.of(ids)

    def _prompt_text_offsets(self) -> list[int] | None:
        if self.params.prompt_logprobs is None:
            return None
        if self.tokenizer is None:
            return [0] * len(self.prompt_ids)
        skip = self.params.skip_special_tokens and self.prompt is None  # a text may itself have special tokens
        offsets = TokenOffsets(self.tokenizer, skip_special_tokens=skip).of(self.prompt_ids)
        decoded = str(self.tokenizer.decode(self.prompt_ids, skip_special_tokens=skip))
        num_added = max(0, decoded.find(self.prompt_text))  # characters of special tokens that were put before the text
        return [max(0, offset - num_added) for offset in offsets]

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        if self.params.prompt_logprobs is None:
            return None
        return [None, *(self._as_dict(entry) for entry in self.sequences[0].prompt_logprobs)]

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> list[dict[int, Logprob]] | None:
        return None if self.params.logprobs is None else [self._as_dict(entry) for entry in entries]

    def _as_dict(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The token's own entry first, then the most likely others, as in vLLM."""
        logprobs = {entry.token_id: Logprob(entry.logprob, entry.rank, self._decoded(entry.token_id))}
        for rank, (token, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1):
            logprobs.setdefault(token, Logprob(logprob, rank, self._decoded(token)))
        return logprobs

    def _decoded(self, token_id: int) -> str | None:
        return None if self.tokenizer is None else str(self.tokenizer.decode([token_id]))
