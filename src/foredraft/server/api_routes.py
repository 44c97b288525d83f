"""The routes of the API: generation and models as in OpenAI's API, tokenization as in vLLM's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from fastapi import APIRouter, Request
from fastapi.responses import Response

from foredraft.server.generation_response import GenerationResponse
from foredraft.server.json_body import JsonRoute
from foredraft.server.request_log import LOG_FIELDS, REQUEST_ID
from foredraft.server.route_docs import (
    BODY_ERRORS,
    GENERATION_ERRORS,
    KEY_ERRORS,
    MODEL_ERRORS,
    documented,
    documented_stream,
)
from foredraft.server.service import Service
from foredraft.server.unknown_fields import unknown_field_headers
from foredraft.server.wire.chat_builder import ChatBuilder
from foredraft.server.wire.chat_request import ChatRequest, TemplateFields
from foredraft.server.wire.chat_response import ChatResponse
from foredraft.server.wire.completion_builder import CompletionBuilder
from foredraft.server.wire.completion_request import CompletionRequest
from foredraft.server.wire.completion_response import CompletionResponse
from foredraft.server.wire.models import RequestModel, ResponseModel
from foredraft.server.wire.response_builder import ResponseBuilder, ResponseHead
from foredraft.server.wire.responses_builder import ResponsesBuilder
from foredraft.server.wire.responses_request import ResponsesRequest
from foredraft.server.wire.responses_response import ResponsesResponse
from foredraft.server.wire.server_info import ModelCard, ModelList
from foredraft.server.wire.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from foredraft.text.request import Request as EngineRequest


def generation_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post(
        "/v1/completions", response_model=None, responses=documented_stream(CompletionResponse, GENERATION_ERRORS)
    )
    async def completions(body: CompletionRequest, request: Request) -> Response:
        head = _head("cmpl", service.check_model(body.model), request)

        def make_builder(requests: list[EngineRequest]) -> CompletionBuilder:
            prompt_ids = [request.prompt_ids for request in requests]
            return CompletionBuilder(body, head, _echoed_texts(body, requests), prompt_ids)

        return _generate(service, body, request, make_builder)

    @router.post(
        "/v1/chat/completions", response_model=None, responses=documented_stream(ChatResponse, GENERATION_ERRORS)
    )
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        head = _head("chatcmpl", service.check_model(body.model), request)

        def make_builder(requests: list[EngineRequest]) -> ChatBuilder:
            (prompt_ids,) = (request.prompt_ids for request in requests)
            return ChatBuilder(body, head, service.tool_call_parser, service.token_bytes, prompt_ids)

        return _generate(service, body, request, make_builder)

    @router.post(
        "/v1/responses", response_model=None, responses=documented_stream(ResponsesResponse, GENERATION_ERRORS)
    )
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        model = service.check_model(body.model)
        return _generate(service, body, request, lambda _: ResponsesBuilder(body, model, service.tool_call_parser))

    return router


def model_routes(service: Service) -> APIRouter:
    router = APIRouter()
    created = int(time.time())

    def card(name: str) -> ModelCard:
        root = service.settings.model_names[0]
        return ModelCard(id=name, created=created, root=root, max_model_len=service.engine.llm.max_model_len)

    @router.get("/v1/models", response_model=None, responses=documented(ModelList, KEY_ERRORS))
    async def models() -> Response:
        return _json(ModelList(data=[card(name) for name in service.settings.model_names]))

    @router.get(
        "/v1/models/{model:path}", response_model=None, responses=documented(ModelCard, KEY_ERRORS | MODEL_ERRORS)
    )
    async def model(model: str) -> Response:
        return _json(card(service.check_model(model)))

    return router


def token_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)
    errors = KEY_ERRORS | MODEL_ERRORS | BODY_ERRORS

    @router.post("/tokenize", response_model=None, responses=documented(TokenizeResponse, errors))
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        service.check_model(body.model)
        headers = _unknown_field_headers(service, body, request)
        llm = service.engine.llm
        ids = await service.prompt_processor.tokenize(body)
        strings = llm.text_tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        response = TokenizeResponse(count=len(ids), max_model_len=llm.max_model_len, tokens=ids, token_strs=strings)
        return _json(response, headers)

    @router.post("/detokenize", response_model=None, responses=documented(DetokenizeResponse, errors))
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        service.check_model(body.model)
        headers = _unknown_field_headers(service, body, request)
        return _json(DetokenizeResponse(prompt=await service.prompt_processor.detokenize(body.tokens)), headers)

    return router


def _head(prefix: str, model: str, request: Request) -> ResponseHead:
    return ResponseHead.new(prefix, model, request.scope.get(REQUEST_ID))


def _generate(
    service: Service,
    body: CompletionRequest | ChatRequest | ResponsesRequest,
    request: Request,
    make_builder: Callable[[list[EngineRequest]], ResponseBuilder],
) -> GenerationResponse:
    headers = _unknown_field_headers(service, body, request)
    return GenerationResponse(service, body, make_builder, request.scope, headers)


def _unknown_field_headers(service: Service, body: RequestModel, request: Request) -> dict[str, str]:
    unused = ["tools"] if _ignores_tools(service, body) else []
    log_fields = request.scope.get(LOG_FIELDS, {})
    return unknown_field_headers(body, log_fields, strict=service.settings.strict, unused=unused)


def _ignores_tools(service: Service, body: RequestModel) -> bool:
    """Whether the body has tools that neither the chat template nor the parsing or forcing of calls uses."""
    if not isinstance(body, TemplateFields | ResponsesRequest) or "tools" not in body.template_args():
        return False
    if isinstance(body, ChatRequest | ResponsesRequest) and (service.tool_call_parser or body.tool_use.is_forced):
        return False
    return not service.prompt_processor.shows_tools(body)


def _json(response: ResponseModel, headers: Mapping[str, str] | None = None) -> Response:
    return Response(response.model_dump_json(), headers=headers, media_type="application/json")


def _echoed_texts(body: CompletionRequest, requests: list[EngineRequest]) -> list[str]:
    """The texts that echo repeats: the prompts, decoded if they were given as ids."""
    return [request.prompt_text for request in requests] if body.echo else [""] * len(requests)
