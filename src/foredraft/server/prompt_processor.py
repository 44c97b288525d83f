"""Turns request bodies into engine requests. Templates and tokenizers run in threads, so a long prompt does not block others."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from foredraft.aio import AsyncLLM
from foredraft.errors import ForedraftError, PromptLengthError
from foredraft.server.api_errors import ApiError
from foredraft.server.wire.chat_request import ChatRequest, TemplateFields
from foredraft.server.wire.completion_request import CompletionRequest
from foredraft.server.wire.responses_request import ResponsesRequest
from foredraft.server.wire.sampling_fields import SamplingFields
from foredraft.server.wire.tokenization import TokenizeRequest
from foredraft.text.request import Prompt, Request
from foredraft.text.tokenizing import encode_prompt

_CHARACTERS_PER_TOKEN = 32
"""A prompt with more characters than this for each allowed token is rejected before it is tokenised."""

_TOOLS = re.compile(r"\btools\b")


class PromptProcessor:
    """engine: prepares requests and compiles their grammars in the background. max_tokens: of a prompt; None: the context length.
    chat_template: Jinja, used instead of the checkpoint's. trusts_templates: whether a request may contain its own template."""

    def __init__(
        self, engine: AsyncLLM, *, max_tokens: int | None, chat_template: str | None, trusts_templates: bool = False
    ) -> None:
        self._engine = engine
        self._llm = llm = engine.llm
        self._max_tokens = min(max_tokens or llm.max_model_len, llm.max_model_len)
        self._chat_template = chat_template
        self._trusts_templates = trusts_templates
        if llm.tokenizer is not None:
            # the first call may change the tokenizer's settings, so it must not run in a thread
            encode_prompt(llm.tokenizer, "a")

    async def prepare(
        self,
        body: CompletionRequest | ChatRequest | ResponsesRequest,
        *,
        client: str = "",
        request_id: str | None = None,
    ) -> list[Request]:
        """The tokenised requests of a body. Raises ApiError for everything that can be rejected before it runs."""
        with _as_api_errors(body):
            params = body.params()
            prompts: Sequence[Prompt] = (
                body.prompts if isinstance(body, CompletionRequest) else [await self._render(body)]
            )
            for prompt in prompts:
                self._check_length(prompt)
            prepare = partial(self._engine.prepare, client=client, priority=body.priority or 0, request_id=request_id)
            requests = [await prepare(prompt, params) for prompt in prompts]
            for request in requests:
                self._check_tokens(_prompt_field(body), len(request.prompt_ids))
            return requests

    async def tokenize(self, body: TokenizeRequest) -> list[int]:
        """Raises ApiError."""
        with _as_api_errors(body):
            if body.prompt is None:
                return await self._render(body)
            self._check_length(body.prompt)
            special = body.add_special_tokens is not False
            return await asyncio.to_thread(
                encode_prompt, self._llm.text_tokenizer, body.prompt, add_special_tokens=special
            )

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Raises ApiError."""
        with _as_api_errors(None):
            size = self._llm.target.traits.vocab_size
            too_large = next((token for token in ids if token >= size), None)
            if too_large is not None:
                raise ApiError(400, f"tokens contains the id {too_large}: ids go from 0 to {size - 1}", param="tokens")
            return await asyncio.to_thread(self._llm.text_tokenizer.decode, list(ids))

    def shows_tools(self, body: TemplateFields | ResponsesRequest) -> bool:
        """Whether the chat template refers to tools."""
        requested = body.chat_template if isinstance(body, TemplateFields) else None
        template = requested or self._chat_template or getattr(self._llm.tokenizer, "chat_template", None) or ""
        texts = [template] if isinstance(template, str) else template.values()
        return any(_TOOLS.search(text) for text in texts)

    async def _render(self, body: TemplateFields | ResponsesRequest) -> list[int]:
        if body.num_characters > self._max_tokens * _CHARACTERS_PER_TOKEN:
            raise self._too_long(_prompt_field(body), f"{body.num_characters} characters")
        requested = body.chat_template if isinstance(body, TemplateFields) else None
        if requested is not None and not self._trusts_templates:
            raise ApiError(
                400,
                "chat_template is accepted only if the server was started with --trust-request-chat-template",
                param="chat_template",
            )
        template = requested or self._chat_template
        if not (template or self._llm.text_tokenizer.chat_template):
            raise ApiError(
                400,
                "this model has no chat template: use /v1/completions",
                param=_prompt_field(body),
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
        message = f"{param} is too long: it has {size}, but at most {self._max_tokens} tokens are allowed"
        return ApiError(400, message, param=param, code="context_length_exceeded")


def _prompt_field(body: CompletionRequest | TemplateFields | ResponsesRequest) -> str:
    """The name of the field that has the prompt."""
    if isinstance(body, CompletionRequest):
        return "prompt"
    return "input" if isinstance(body, ResponsesRequest) else "messages"


@contextmanager
def _as_api_errors(body: SamplingFields | TokenizeRequest | None) -> Iterator[None]:
    """Turns the engine's errors into ApiErrors that name the field."""
    try:
        yield
    except ForedraftError as error:
        error_field = body.error_field(error) if isinstance(body, SamplingFields) else None
        code = "context_length_exceeded" if isinstance(error, PromptLengthError) else None
        raise ApiError(400, str(error), param=error_field, code=code) from None
