"""Builds the responses of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foredraft.server.wire.completion_request import CompletionRequest
from foredraft.server.wire.completion_response import CompletionChoice, CompletionLogprobs, CompletionResponse
from foredraft.server.wire.models import ResponseModel
from foredraft.server.wire.response_builder import ResponseBuilder, ResponseHead
from foredraft.server.wire.token_logprobs import chosen_of, logprob_of, prompt_logprobs_of, text_of
from foredraft.server.wire.usage import Usage, usage_of
from foredraft.text.outputs import CompletionOutput, Delta, Logprob, RequestOutput


class CompletionBuilder(ResponseBuilder):
    """prompt_texts: the text of each prompt, which echo repeats; they may be empty without echo. prompt_ids: the token ids of each
    prompt, for return_token_ids in a stream; there may be none without it."""

    def __init__(
        self,
        body: CompletionRequest,
        head: ResponseHead,
        prompt_texts: Sequence[str],
        prompt_ids: Sequence[list[int]] = (),
    ) -> None:
        super().__init__(body, head)
        self._prompt_ids = prompt_ids
        self._body = body
        self._prompt_texts = prompt_texts
        self._begun: set[int] = set()
        """The texts, by their index in the response, that have a chunk."""

    def chunks(self, prompt_index: int, delta: Delta) -> list[ResponseModel]:
        index = prompt_index * self._body.num_texts + delta.index
        is_first = index not in self._begun
        self._begun.add(index)
        text = self._prompt_texts[prompt_index] + delta.text if self._body.echo and is_first else delta.text
        logprobs = None if delta.logprobs is None else _logprobs_of(delta.logprobs, delta.text_offsets or ())
        includes_ids = bool(self._body.return_token_ids)
        if not (text or delta.finish_reason or logprobs or includes_ids):
            return []  # a part of a character
        choice = CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,  # type: ignore[arg-type]  # a failed text has no chunk
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if includes_ids else None,
            prompt_token_ids=self._prompt_ids[prompt_index] if includes_ids and is_first else None,
        )
        return [self._response([choice])]

    def response(self, outputs: Sequence[RequestOutput]) -> ResponseModel:
        choices = [self._choice(i, output, text) for i, output in enumerate(outputs) for text in output.outputs]
        return self._response(choices, usage_of(outputs), self._metrics(outputs))

    def _summary_chunk(self, usage: Usage | None, metrics: dict[str, Any] | None) -> ResponseModel:
        return self._response([], usage, metrics)

    def _response(
        self, choices: list[CompletionChoice], usage: Usage | None = None, metrics: dict[str, Any] | None = None
    ) -> CompletionResponse:
        head = self._head
        return CompletionResponse(
            id=head.id, created=head.created, model=head.model, choices=choices, usage=usage, metrics=metrics
        )

    def _choice(self, prompt_index: int, output: RequestOutput, text: CompletionOutput) -> CompletionChoice:
        echoed = self._prompt_texts[prompt_index] if self._body.echo else ""
        includes_prompt_logprobs = self._body.prompt_logprobs is not None
        includes_ids = bool(self._body.return_token_ids)
        return CompletionChoice(
            index=prompt_index * self._body.num_texts + text.index,
            text=echoed + text.text,
            logprobs=self._choice_logprobs(output, text, echoed),
            finish_reason=text.finish_reason,  # type: ignore[arg-type]
            stop_reason=text.stop_reason,
            prompt_logprobs=prompt_logprobs_of(output) if includes_prompt_logprobs else None,
            token_ids=text.token_ids if includes_ids else None,
            prompt_token_ids=output.prompt_token_ids if includes_ids else None,
        )

    def _choice_logprobs(self, output: RequestOutput, text: CompletionOutput, echoed: str) -> CompletionLogprobs | None:
        if text.logprobs is None:
            return None
        offsets = [len(echoed) + offset for offset in text.text_offsets or ()]
        if self._body.echo and output.prompt_logprobs is not None:
            tokens = [*output.prompt_logprobs, *text.logprobs]
            return _echoed_logprobs_of(tokens, [*(output.prompt_text_offsets or ()), *offsets], echoed)
        return _logprobs_of(text.logprobs, offsets)


def _logprobs_of(tokens: Sequence[dict[int, Logprob]], offsets: Sequence[int]) -> CompletionLogprobs:
    """offsets: where each token begins in the text of the response."""
    chosen = [entries[chosen_of(entries)] for entries in tokens]
    return CompletionLogprobs(
        tokens=[text_of(entry) for entry in chosen],
        token_logprobs=[logprob_of(entry) for entry in chosen],
        top_logprobs=[_by_text(entries) for entries in tokens],
        text_offset=list(offsets),
    )


def _by_text(entries: dict[int, Logprob]) -> dict[str, float]:
    """Of entries with the same text the first, which may be that of the chosen token."""
    by_text: dict[str, float] = {}
    for entry in entries.values():
        by_text.setdefault(text_of(entry), logprob_of(entry))
    return by_text


def _echoed_logprobs_of(
    tokens: Sequence[dict[int, Logprob] | None], offsets: Sequence[int], echoed: str
) -> CompletionLogprobs:
    """With the prompt's tokens in front. The first one has no log probability, since nothing precedes it."""
    rest = _logprobs_of([entries for entries in tokens if entries is not None], offsets[1:])
    first_text = echoed[: offsets[1]] if len(offsets) > 1 else echoed
    return CompletionLogprobs(
        tokens=[first_text, *rest.tokens],
        token_logprobs=[None, *rest.token_logprobs],
        top_logprobs=[None, *rest.top_logprobs],
        text_offset=[0, *rest.text_offset],
    )
