"""Builds the responses of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foredraft.server.tool_parsers import Content, Piece
from foredraft.server.wire.chat_request import ChatRequest
from foredraft.server.wire.chat_response import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatResponse,
    TokenLogprob,
    TopLogprob,
)
from foredraft.server.wire.models import ResponseModel
from foredraft.server.wire.response_builder import ResponseBuilder, ResponseHead
from foredraft.server.wire.token_logprobs import (
    bytes_of,
    chosen_of,
    logprob_of,
    most_likely,
    prompt_logprobs_of,
    text_of,
)
from foredraft.server.wire.tool_calls import MessageToolCall, ToolCallIndexer, ToolCallReader, split_pieces
from foredraft.server.wire.tool_use import new_call_id
from foredraft.server.wire.usage import Usage, usage_of
from foredraft.text.outputs import CompletionOutput, Delta, Logprob, RequestOutput
from foredraft.vocabulary import TokenBytes


class ChatBuilder(ResponseBuilder):
    """tool_call_parser: the name of the parser for calls that the model makes on its own; None leaves them as text. token_bytes: of
    the model's tokenizer, for log probabilities. prompt_ids: the token ids of the prompt, for return_token_ids in a stream."""

    def __init__(
        self,
        body: ChatRequest,
        head: ResponseHead,
        tool_call_parser: str | None = None,
        token_bytes: TokenBytes | None = None,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        super().__init__(body, head)
        self._prompt_ids = list(prompt_ids) if body.return_token_ids else None
        self._token_bytes = token_bytes
        self._body = body
        self._tool_call_parser = tool_call_parser
        self._num_top_logprobs = body.top_logprobs or 0
        self._readers: dict[int, tuple[ToolCallReader, ToolCallIndexer]] = {}

    def chunks(self, _: int, delta: Delta) -> list[ResponseModel]:
        first: list[ResponseModel] = []
        if delta.index not in self._readers:
            self._readers[delta.index] = self._reader(), ToolCallIndexer()
            begin = self._delta_chunk(delta.index, ChatDelta(role="assistant", content=""))
            first.append(begin.model_copy(update={"prompt_token_ids": self._prompt_ids}))
        reader, calls = self._readers[delta.index]
        pieces = reader.read(delta.text, is_end=delta.finish_reason is not None)
        if not (pieces or delta.finish_reason or delta.logprobs is not None or self._body.return_token_ids):
            return first  # a part of a character, or of a call
        *others, last = [_delta_of(piece, calls) for piece in pieces] or [ChatDelta()]
        chunks = [self._delta_chunk(delta.index, other) for other in others]
        return [*first, *chunks, self._chunk([self._chunk_choice(delta, last, reader)])]

    def response(self, outputs: Sequence[RequestOutput]) -> ResponseModel:
        (output,) = outputs
        head = self._head
        return ChatResponse(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=[self._choice(text) for text in output.outputs],
            usage=usage_of(outputs),
            metrics=self._metrics(outputs),
            prompt_logprobs=prompt_logprobs_of(output),
            prompt_token_ids=output.prompt_token_ids if self._body.return_token_ids else None,
        )

    def _summary_chunk(self, usage: Usage | None, metrics: dict[str, Any] | None) -> ResponseModel:
        return self._chunk([], usage, metrics)

    def _delta_chunk(self, index: int, delta: ChatDelta) -> ChatChunk:
        return self._chunk([ChatChunkChoice(index=index, delta=delta)])

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: Usage | None = None, metrics: dict[str, Any] | None = None
    ) -> ChatChunk:
        head = self._head
        return ChatChunk(
            id=head.id, created=head.created, model=head.model, choices=choices, usage=usage, metrics=metrics
        )

    def _chunk_choice(self, delta: Delta, last: ChatDelta, reader: ToolCallReader) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=delta.index,
            delta=last,
            logprobs=None if delta.logprobs is None else self._logprobs(delta.logprobs),
            finish_reason=reader.finish_reason(delta.finish_reason),  # type: ignore[arg-type]  # a failed text has no chunk
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self._body.return_token_ids else None,
        )

    def _reader(self) -> ToolCallReader:
        return ToolCallReader(self._body.tool_use.parser(self._tool_call_parser))

    def _choice(self, text: CompletionOutput) -> ChatChoice:
        reader = self._reader()
        content, functions = split_pieces(reader.read(text.text, is_end=True))
        calls = [MessageToolCall(id=new_call_id(), function=function) for function in functions]
        return ChatChoice(
            index=text.index,
            message=ChatMessage(content=None if calls and not content else content, tool_calls=calls or None),
            logprobs=None if text.logprobs is None else self._logprobs(text.logprobs),
            finish_reason=reader.finish_reason(text.finish_reason),  # type: ignore[arg-type]
            stop_reason=text.stop_reason,
            token_ids=text.token_ids if self._body.return_token_ids else None,
        )

    def _logprobs(self, tokens: Sequence[dict[int, Logprob]]) -> ChatLogprobs:
        return ChatLogprobs(content=[self._token_logprob(entries) for entries in tokens])

    def _token_logprob(self, entries: dict[int, Logprob]) -> TokenLogprob:
        chosen, top = chosen_of(entries), most_likely(entries, self._num_top_logprobs)
        top_logprobs = [TopLogprob(**self._as_fields(token, entries[token])) for token in top]
        return TokenLogprob(**self._as_fields(chosen, entries[chosen]), top_logprobs=top_logprobs)

    def _as_fields(self, token: int, entry: Logprob) -> dict[str, Any]:
        text = text_of(entry)
        return {"token": text, "logprob": logprob_of(entry), "bytes": bytes_of(token, text, self._token_bytes)}


def _delta_of(piece: Piece, calls: ToolCallIndexer) -> ChatDelta:
    return ChatDelta(content=piece.text) if isinstance(piece, Content) else ChatDelta(tool_calls=[calls.delta(piece)])
