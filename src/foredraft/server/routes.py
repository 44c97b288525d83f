"""The routes: each hands over to somebody."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from foredraft import __version__
from foredraft.server.bodies import JsonRoute
from foredraft.server.errors import ApiError
from foredraft.server.ignored import ignored_headers
from foredraft.server.logging import NOTE, REQUEST_ID
from foredraft.server.reply import Reply, Writer
from foredraft.server.service import Service
from foredraft.server.wire.answers import Head
from foredraft.server.wire.base import Answer, Wire
from foredraft.server.wire.chat import ChatRequest, ChatResponse, Chats
from foredraft.server.wire.completions import CompletionRequest, CompletionResponse, Completions
from foredraft.server.wire.errors import ErrorBody
from foredraft.server.wire.listing import ModelCard, ModelList, Status, Version
from foredraft.server.wire.response_answers import Responses, ResponsesResponse
from foredraft.server.wire.responses import ResponsesRequest
from foredraft.server.wire.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from foredraft.text.request import Request as EngineRequest

PUBLIC = frozenset({"/health", "/ready"})
"""Paths that need no key: they say nothing but that somebody is there."""

_EVERYWHERE = {401: "The key is missing or wrong.", 400: "Something cannot be honoured; the message names it."}
_WITH_BODY = {
    **_EVERYWHERE,
    408: "It took too long.",
    413: "The body is too large.",
    415: "The body is compressed.",
    503: "Starting or shutting down.",
}
_WRITING = {
    **_WITH_BODY,
    404: "There is no such model.",
    429: "Too many texts are written or wait.",
    500: "The server failed; its log says more.",
}
_EVENTS = {
    "text/event-stream": {
        "schema": {
            "type": "object",
            "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
            "required": ["data"],
        },
        "description": "With stream: chunks, then [DONE]; of /v1/responses named events.",
    }
}


def _errors(of: dict[int, str]) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorBody, "description": what} for status, what in of.items()}


def api_routes(service: Service) -> APIRouter:
    """OpenAI's."""
    router = APIRouter(route_class=JsonRoute)
    created = int(time.time())

    @router.post(
        "/v1/completions",
        response_model=None,
        responses={200: {"model": CompletionResponse, "content": _EVENTS}, **_errors(_WRITING)},
    )
    async def completions(body: CompletionRequest, request: Request) -> Response:
        head = Head.new("cmpl", service.check_model(body.model), request.scope.get(REQUEST_ID))
        return _reply(service, body, request, lambda found: Completions(body, head, _texts_of(body, found)))

    @router.post(
        "/v1/chat/completions",
        response_model=None,
        responses={200: {"model": ChatResponse, "content": _EVENTS}, **_errors(_WRITING)},
    )
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        head = Head.new("chatcmpl", service.check_model(body.model), request.scope.get(REQUEST_ID))
        return _reply(service, body, request, lambda _: Chats(body, head, service.tool_form))

    @router.post(
        "/v1/responses",
        response_model=None,
        responses={200: {"model": ResponsesResponse, "content": _EVENTS}, **_errors(_WRITING)},
    )
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        model = service.check_model(body.model)
        return _reply(service, body, request, lambda _: Responses(body, model, service.tool_form))

    @router.get("/v1/models", response_model=None, responses={200: {"model": ModelList}, **_errors(_LISTING)})
    async def models() -> Response:
        return _json(ModelList(data=[card(name) for name in service.settings.model_names]))

    @router.get(
        "/v1/models/{model:path}",
        response_model=None,
        responses={200: {"model": ModelCard}, **_errors({**_LISTING, 404: "There is no such model."})},
    )
    async def model(model: str) -> Response:
        return _json(card(service.check_model(model)))

    def card(name: str) -> ModelCard:
        root = service.settings.model_names[0]
        return ModelCard(id=name, created=created, root=root, max_model_len=service.engine.llm.max_model_len)

    return router


_LISTING = {**_EVERYWHERE, 503: "Starting or shutting down."}


def token_routes(service: Service) -> APIRouter:
    """vLLM's."""
    router = APIRouter(route_class=JsonRoute)

    @router.post(
        "/tokenize",
        response_model=None,
        responses={200: {"model": TokenizeResponse}, **_errors({**_WITH_BODY, 404: "There is no such model."})},
    )
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        service.check_model(body.model)
        headers = headers_of(body, request)
        llm = service.engine.llm
        ids = await service.prompts.tokenized(body)
        strings = llm.text_tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        found = TokenizeResponse(count=len(ids), max_model_len=llm.max_model_len, tokens=ids, token_strs=strings)
        return _json(found, headers)

    @router.post(
        "/detokenize",
        response_model=None,
        responses={200: {"model": DetokenizeResponse}, **_errors({**_WITH_BODY, 404: "There is no such model."})},
    )
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        service.check_model(body.model)
        headers = headers_of(body, request)
        return _json(DetokenizeResponse(prompt=await service.prompts.detokenized(body.tokens)), headers)

    def headers_of(body: Wire, request: Request) -> dict[str, str]:
        return ignored_headers(body, request.scope.get(NOTE, {}), strict=service.settings.strict)

    return router


def state_routes(service: Service) -> APIRouter:
    """For whatever looks after it. Without a key."""
    router = APIRouter()

    @router.get(
        "/health", response_model=None, responses={200: {"model": Status}, **_errors({503: "The engine is gone."})}
    )
    async def health() -> Response:
        if not service.is_alive:
            raise ApiError(503, "the engine is gone", code="unavailable")
        return _json(Status(status="ok"))

    @router.get(
        "/ready",
        response_model=None,
        responses={200: {"model": Status}, **_errors({503: "Starting or shutting down."})},
    )
    async def ready() -> Response:
        service.engine  # noqa: B018  # raises where there is none
        return _json(Status(status="ready"))

    return router


def operation_routes(service: Service) -> APIRouter:
    """For whoever runs it."""
    router = APIRouter()

    @router.get("/version", response_model=None, responses={200: {"model": Version}, **_errors(_EVERYWHERE)})
    async def version() -> Response:
        return _json(Version(version=__version__))

    @router.get(
        "/metrics",
        response_model=None,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **_errors(_EVERYWHERE)},
    )
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


def _reply(
    service: Service,
    body: CompletionRequest | ChatRequest | ResponsesRequest,
    request: Request,
    make_writer: Callable[[list[EngineRequest]], Writer],
) -> Reply:
    headers = ignored_headers(body, request.scope.get(NOTE, {}), strict=service.settings.strict)
    return Reply(service, body, make_writer, request.scope, headers)


def _json(answer: Answer, headers: Mapping[str, str] | None = None) -> Response:
    return Response(answer.model_dump_json(), headers=headers, media_type="application/json")


def _texts_of(body: CompletionRequest, requests: list[EngineRequest]) -> list[str]:
    """What echo repeats: the prompts, decoded where ids were given."""
    return [one.prompt_text for one in requests] if body.echo else [""] * len(requests)
