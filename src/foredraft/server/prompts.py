"""From bodies to what the engine reads. Templates and tokenizers run in threads, so that a long prompt keeps nobody waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from foredraft.aio import AsyncLLM
from foredraft.errors import ForedraftError, PromptLengthError
from foredraft.server.errors import ApiError
from foredraft.server.wire.chat import ChatRequest, TemplateFields
from foredraft.server.wire.completions import CompletionRequest
from foredraft.server.wire.responses import ResponsesRequest
from foredraft.server.wire.sampling import SamplingFields
from foredraft.server.wire.tokens import TokenizeRequest
from foredraft.text.request import Prompt, Request
from foredraft.text.text import encode_prompt

_CHARACTERS_PER_TOKEN = 32
"""A prompt of more characters than that for each token that may be is not even tokenised."""


class Prompts:
    """engine: prepares requests, where a grammar that must be compiled holds up no other. max_tokens: of a prompt; None: what the context holds. chat_template: Jinja, in the place of the checkpoint's.
    trusts_templates: whether a request may bring one of its own."""

    def __init__(
        self, engine: AsyncLLM, *, max_tokens: int | None, chat_template: str | None, trusts_templates: bool = False
    ) -> None:
        self._engine = engine
        self._llm = llm = engine.llm
        self._max_tokens = min(max_tokens or llm.max_model_len, llm.max_model_len)
        self._chat_template = chat_template
        self._trusts_templates = trusts_templates
        if llm.tokenizer is not None:
            # a tokenizer may come with settings that its first call changes, and then another thread must not be using it
            encode_prompt(llm.tokenizer, "a")

    async def requests(
        self,
        body: CompletionRequest | ChatRequest | ResponsesRequest,
        *,
        client: str = "",
        request_id: str | None = None,
    ) -> list[Request]:
        """Checked and tokenised. Raises ApiError for everything that can be refused before it runs."""
        with _blaming(body):
            params = body.params()
            prompts: Sequence[Prompt] = (
                body.prompts if isinstance(body, CompletionRequest) else [await self._rendered(body)]
            )
            for prompt in prompts:
                self._check_length(prompt)
            prepare = partial(self._engine.prepare, client=client, priority=body.priority or 0, request_id=request_id)
            found = [await prepare(prompt, params) for prompt in prompts]
            for request in found:
                self._check_tokens(_field_of(body), len(request.prompt_ids))
            return found

    async def tokenized(self, body: TokenizeRequest) -> list[int]:
        """Raises ApiError."""
        with _blaming(body):
            if body.prompt is None:
                return await self._rendered(body)
            self._check_length(body.prompt)
            special = body.add_special_tokens is not False
            return await asyncio.to_thread(
                encode_prompt, self._llm.text_tokenizer, body.prompt, add_special_tokens=special
            )

    async def detokenized(self, ids: Sequence[int]) -> str:
        """Raises ApiError."""
        with _blaming(None):
            size = self._llm.target.traits.vocab_size
            bad = next((token for token in ids if token >= size), None)
            if bad is not None:
                raise ApiError(400, f"tokens holds the id {bad}: ids go from 0 to {size - 1}", param="tokens")
            return await asyncio.to_thread(self._llm.text_tokenizer.decode, list(ids))

    async def _rendered(self, body: TemplateFields | ResponsesRequest) -> list[int]:
        if body.num_characters > self._max_tokens * _CHARACTERS_PER_TOKEN:
            raise self._too_long(_field_of(body), f"{body.num_characters} characters")
        asked = body.chat_template if isinstance(body, TemplateFields) else None
        if asked is not None and not self._trusts_templates:
            raise ApiError(
                400,
                "chat_template is taken only by a server started with --trust-request-chat-template",
                param="chat_template",
            )
        template = asked or self._chat_template
        if not (template or self._llm.text_tokenizer.chat_template):
            raise ApiError(
                400,
                "this model has no chat template: use /v1/completions",
                param=_field_of(body),
                code="no_chat_template",
            )
        messages, args = body.template_messages(), body.template_args()
        return await asyncio.to_thread(self._llm.chat_prompt, messages, chat_template=template, **args)

    def _check_length(self, prompt: Prompt) -> None:
        if isinstance(prompt, str) and len(prompt) > self._max_tokens * _CHARACTERS_PER_TOKEN:
            raise self._too_long("prompt", f"{len(prompt)} characters")

    def _check_tokens(self, param: str, count: int) -> None:
        if count > self._max_tokens:
            raise self._too_long(param, f"{count} tokens")

    def _too_long(self, param: str, size: str) -> ApiError:
        message = f"{param} is too long: it has {size}, and at most {self._max_tokens} tokens are taken"
        return ApiError(400, message, param=param, code="context_length_exceeded")


def _field_of(body: CompletionRequest | TemplateFields | ResponsesRequest) -> str:
    """Where its prompt stands."""
    if isinstance(body, CompletionRequest):
        return "prompt"
    return "input" if isinstance(body, ResponsesRequest) else "messages"


@contextmanager
def _blaming(body: SamplingFields | TokenizeRequest | None) -> Iterator[None]:
    """What the engine refuses, as an answer that names the field."""
    try:
        yield
    except ForedraftError as error:
        blamed = body.blamed(error) if isinstance(body, SamplingFields) else None
        code = "context_length_exceeded" if isinstance(error, PromptLengthError) else None
        raise ApiError(400, str(error), param=blamed, code=code) from None
