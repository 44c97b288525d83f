"""Builds the responses of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from foredraft.server.wire.completion_request import CompletionRequest
from foredraft.server.wire.completion_response import CompletionChoice, CompletionLogprobs, CompletionResponse
from foredraft.server.wire.models import ResponseModel
from foredraft.server.wire.response_builder import ResponseBuilder, ResponseHead
from foredraft.server.wire.token_logprobs import chosen_and_top, logprob_of, prompt_logprobs_of, text_of
from foredraft.server.wire.usage import Usage, usage_of
from foredraft.text.outputs import CompletionOutput, Delta, Logprob, RequestOutput


class CompletionBuilder(ResponseBuilder):
    """prompt_texts: the text of each prompt, which echo repeats; they may be empty without echo."""

    def __init__(self, body: CompletionRequest, head: ResponseHead, prompt_texts: Sequence[str]) -> None:
        super().__init__(body, head)
        self._body = body
        self._prompt_texts = prompt_texts
        self._offsets: dict[int, int] = {}
        """The number of characters sent of each text, by its index in the response."""

    def chunks(self, prompt_index: int, delta: Delta) -> list[ResponseModel]:
        index = prompt_index * self._body.num_texts + delta.index
        is_first = index not in self._offsets
        text = self._prompt_texts[prompt_index] + delta.text if self._body.echo and is_first else delta.text
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + len(text)
        logprobs = None if delta.logprobs is None else self._logprobs(delta.logprobs, offset)
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
        tokens: list[dict[int, Logprob] | None] = list(text.logprobs)
        if self._body.echo and output.prompt_logprobs is not None:
            return self._echoed_logprobs(output, echoed, tokens)
        return self._logprobs(tokens, len(echoed))

    def _logprobs(self, tokens: Sequence[dict[int, Logprob] | None], offset: int) -> CompletionLogprobs:
        """offset: the number of characters before the first token."""
        result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for entries in tokens:
            if entries is None:
                continue
            chosen, _ = chosen_and_top(entries, 0)
            result.tokens.append(text_of(chosen))
            result.token_logprobs.append(logprob_of(chosen))
            result.top_logprobs.append({text_of(entry): logprob_of(entry) for entry in entries.values()})
            result.text_offset.append(offset)
            offset += len(text_of(chosen))
        return result

    def _echoed_logprobs(
        self, output: RequestOutput, echoed: str, tokens: Sequence[dict[int, Logprob] | None]
    ) -> CompletionLogprobs:
        """With the prompt's tokens in front. The first one has no log probability, since nothing precedes it."""
        assert output.prompt_logprobs is not None
        rest = self._logprobs(output.prompt_logprobs[1:], 0)
        first_text = _text_before(rest.tokens, echoed)
        offset = len(first_text)
        rest = self._logprobs([*output.prompt_logprobs[1:], *tokens], offset)
        return CompletionLogprobs(
            tokens=[first_text, *rest.tokens],
            token_logprobs=[None, *rest.token_logprobs],
            top_logprobs=[None, *rest.top_logprobs],
            text_offset=[0, *rest.text_offset],
        )


def _text_before(tokens: Sequence[str], text: str) -> str:
    """The part of a text before these tokens, which are the rest of it. A token with a part of a character is as long as a whole one, so
    the tokens before the first such token decide."""
    whole = list(takewhile(lambda token: "\ufffd" not in token, tokens))
    known = "".join(whole)
    start = len(text) - len(known) if len(whole) == len(tokens) else text.find(known)
    return text[: max(start, 0)]
