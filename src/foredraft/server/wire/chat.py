"""/v1/chat/completions: from a body to messages and parameters, from deltas and outputs to answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from foredraft.errors import ForedraftError
from foredraft.sampling import SamplingParams, StructuredOutputs
from foredraft.server.tool_parsers import Content, Piece
from foredraft.server.wire.answers import (
    Answers,
    Head,
    PromptLogprobs,
    Usage,
    bytes_of,
    logprob_of,
    own_and_top,
    prompt_logprobs_of,
    text_of,
    usage_of,
)
from foredraft.server.wire.base import Answer, Only, TopCount, Wire, if_any
from foredraft.server.wire.calls import CallDelta, CallStream, TextReader, WrittenCall, sorted_pieces
from foredraft.server.wire.messages import Message
from foredraft.server.wire.sampling import SamplingFields
from foredraft.server.wire.tools import MOST_TOOLS, Mode, NamedChoice, Tool, ToolUse, new_call_id
from foredraft.text.outputs import CompletionOutput, Delta, Logprob, RequestOutput

_MOST_MESSAGES = 4096
MOST_TEMPLATE = 65536
"""Characters of a chat template that a request brings."""


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=_MOST_MESSAGES)]


class TemplateFields(Wire):
    """What a chat template is told."""

    messages: Messages | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(
        None, description="Go on with the last message, an assistant's, instead of beginning another."
    )
    chat_template: Annotated[str, Field(min_length=1, max_length=MOST_TEMPLATE)] | None = Field(
        None, description="Jinja, in the place of the model's; only where the server was told to trust it."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="A template's own switches.")

    @model_validator(mode="after")
    def _check_template_kwargs(self) -> Self:
        taken = {
            "messages",
            "conversation",
            "tools",
            "add_generation_prompt",
            "continue_final_message",
            "chat_template",
            "tokenize",
        }
        bad = next((name for name in self.chat_template_kwargs or {} if name in taken), None)
        if bad is not None:
            raise ValueError(f"chat_template_kwargs must not hold {bad!r}")
        return self

    @model_validator(mode="after")
    def _check_continuation(self) -> Self:
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise ValueError("continue_final_message and add_generation_prompt exclude each other: leave one out")
            last = self.messages[-1] if self.messages else None
            if last is not None and (last.role != "assistant" or not last.content):
                raise ValueError("continue_final_message needs a last message of the assistant, with content")
        return self

    @property
    def num_characters(self) -> int:
        """About so many go through the template."""
        contents = (message.content or "" for message in self.messages or ())
        return sum(len(c) if isinstance(c, str) else sum(len(part.text) for part in c) for c in contents)

    def template_messages(self) -> list[dict[str, Any]]:
        return [message.for_template() for message in self.messages or ()]

    def template_args(self) -> dict[str, Any]:
        found: dict[str, Any] = dict(self.chat_template_kwargs or {})
        if self.tools:
            found["tools"] = [tool.function.for_template() for tool in self.tools]
        if self.add_generation_prompt is not None:
            found["add_generation_prompt"] = self.add_generation_prompt
        if self.continue_final_message:
            found["continue_final_message"] = True
        return found


class ChatRequest(SamplingFields, TemplateFields):
    """What OpenAI's documents list for it, and vLLM's and our extras."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    tool_choice: Mode | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    safety_identifier: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="Whose request it is; goes to the log."
    )
    prompt_cache_key: str | None = Field(
        None, description="Every request shares one prefix cache: any key leads to it."
    )
    audio: Annotated[Any, Only(reason="text only")] = None
    modalities: Annotated[Any, Only(["text"], reason="text only")] = None
    function_call: Annotated[Any, Only("none", reason="use tools")] = None
    functions: Annotated[Any, Only(reason="use tools")] = None
    metadata: Annotated[Any, Only({}, reason="completions are not stored")] = None
    moderation: Annotated[Any, Only(reason="nothing is moderated")] = None
    prediction: Annotated[Any, Only(reason="draft tokens come from the drafter")] = None
    prompt_cache_options: Annotated[Any, Only(reason="the prefix cache keeps what fits")] = None
    prompt_cache_retention: Annotated[Any, Only("in_memory", reason="the prefix cache is in memory")] = None
    reasoning_effort: Annotated[Any, Only(reason="say it to the template, in chat_template_kwargs")] = None
    service_tier: Annotated[Any, Only("auto", "default", reason="there is one tier")] = None
    store: Annotated[Any, Only(False, reason="completions are not stored")] = None
    verbosity: Annotated[Any, Only(reason="say it in a message")] = None
    web_search_options: Annotated[Any, Only(reason="there is no web search")] = None

    @cached_property
    def tool_use(self) -> ToolUse:
        functions = [tool.function for tool in self.tools or ()]
        parallel = self.parallel_tool_calls is not False
        if isinstance(self.tool_choice, NamedChoice):
            return ToolUse(functions, self.tool_choice.function.name, is_named=True, parallel=parallel)
        return ToolUse(functions, self.tool_choice or "auto", parallel=parallel)

    def unread(self) -> Iterator[str]:
        yield from super().unread()
        yield from self.tool_use.unread("tools[{}].function.strict")

    @model_validator(mode="after")
    def _check_own(self) -> Self:
        if self.tool_use.is_forced and self._forms:
            raise ValueError(f"tool_choice and {self._forms[0]} both say what form the text has: give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError("max_tokens is the old name of max_completion_tokens: give one of them")
        return self

    def template_args(self) -> dict[str, Any]:
        found = super().template_args()
        if self.tool_choice == "none":
            found.pop("tools", None)
        return found

    def _structured(self) -> StructuredOutputs | None:
        return self.tool_use.form() or super()._structured()

    def blamed(self, error: ForedraftError) -> str | None:
        is_form = self.tool_use.is_forced and str(error).startswith("structured_outputs")
        return "tools" if is_form else super().blamed(error)

    def params(self) -> SamplingParams:
        """Raises ForedraftError for what cannot be honoured. Without a limit the answer may go to the context's end."""
        most = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return self._params(max_tokens=most, logprobs=(self.top_logprobs or 0) if self.logprobs else None)


class TopLogprob(Answer):
    """bytes: None where the token is only a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[TokenLogprob]


class ChatMessage(Answer):
    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: list[WrittenCall] | None = if_any()
    refusal: None = None


class ChatChoice(Answer):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None = None
    token_ids: list[int] | None = if_any()


class ChatResponse(Answer):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: dict[str, Any] | None = if_any()
    prompt_logprobs: PromptLogprobs | None = if_any()
    prompt_token_ids: list[int] | None = if_any()


class ChatDelta(Answer):
    role: Literal["assistant"] | None = if_any()
    content: str | None = if_any()
    tool_calls: list[CallDelta] | None = if_any()


class ChatChunkChoice(Answer):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = if_any()


class ChatChunk(Answer):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    metrics: dict[str, Any] | None = if_any()


class Chats(Answers):
    """The answer to one body, whole or in chunks. tool_form: in which the model calls tools, one of PARSERS, or None."""

    def __init__(self, body: ChatRequest, head: Head, tool_form: str | None = None) -> None:
        super().__init__(body, head)
        self._body = body
        self._tool_form = tool_form
        self._num_top = body.top_logprobs or 0
        self._begun: dict[int, tuple[TextReader, CallStream]] = {}

    def chunks(self, _: int, delta: Delta) -> list[Answer]:
        found: list[Answer] = []
        if delta.index not in self._begun:
            self._begun[delta.index] = self._reader(), CallStream()
            role = ChatDelta(role="assistant", content="")
            found.append(self._chunk([ChatChunkChoice(index=delta.index, delta=role)]))
        logprobs = None if delta.logprobs is None else self._logprobs(delta.logprobs)
        shows_ids = bool(self._body.return_token_ids)
        reader, calls = self._begun[delta.index]
        pieces = reader.read(delta.text, is_end=delta.finish_reason is not None)
        if not (pieces or delta.finish_reason or logprobs or shows_ids):
            return found  # a part of a character, or of a call
        *others, last = [_delta_of(piece, calls) for piece in pieces] or [ChatDelta()]
        found += [self._chunk([ChatChunkChoice(index=delta.index, delta=one)]) for one in others]
        choice = ChatChunkChoice(
            index=delta.index,
            delta=last,
            logprobs=logprobs,
            finish_reason=reader.finish_reason(delta.finish_reason),  # type: ignore[arg-type]  # what fails has no chunk
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if shows_ids else None,
        )
        return [*found, self._chunk([choice])]

    def whole(self, outputs: Sequence[RequestOutput]) -> Answer:
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

    def _tail(self, usage: Usage | None, metrics: dict[str, Any] | None) -> Answer:
        return self._chunk([], usage, metrics)

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: Usage | None = None, metrics: dict[str, Any] | None = None
    ) -> ChatChunk:
        head = self._head
        return ChatChunk(
            id=head.id, created=head.created, model=head.model, choices=choices, usage=usage, metrics=metrics
        )

    def _reader(self) -> TextReader:
        return TextReader(self._body.tool_use.parser(self._tool_form))

    def _choice(self, text: CompletionOutput) -> ChatChoice:
        reader = self._reader()
        content, functions = sorted_pieces(reader.read(text.text, is_end=True))
        calls = [WrittenCall(id=new_call_id(), function=one) for one in functions]
        return ChatChoice(
            index=text.index,
            message=ChatMessage(content=None if calls and not content else content, tool_calls=calls or None),
            logprobs=None if text.logprobs is None else self._logprobs(text.logprobs),
            finish_reason=reader.finish_reason(text.finish_reason),  # type: ignore[arg-type]
            stop_reason=text.stop_reason,
            token_ids=text.token_ids if self._body.return_token_ids else None,
        )

    def _logprobs(self, entries: Sequence[dict[int, Logprob]]) -> ChatLogprobs:
        return ChatLogprobs(content=[self._token(one) for one in entries])

    def _token(self, entries: dict[int, Logprob]) -> TokenLogprob:
        own, top = own_and_top(entries, self._num_top)
        return TokenLogprob(**_shown(own), top_logprobs=[TopLogprob(**_shown(entry)) for entry in top])


def _delta_of(piece: Piece, calls: CallStream) -> ChatDelta:
    return ChatDelta(content=piece.text) if isinstance(piece, Content) else ChatDelta(tool_calls=[calls.delta(piece)])


def _shown(entry: Logprob) -> dict[str, Any]:
    text = text_of(entry)
    return {"token": text, "logprob": logprob_of(entry), "bytes": bytes_of(text)}
