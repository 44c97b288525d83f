"""The application: routes around a service, behind middleware. It opens no socket and has no globals, so any ASGI server may run
it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer
from prometheus_client import Counter
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from foredraft import __version__
from foredraft.llm import LLM
from foredraft.server import live, operation_routes
from foredraft.server.api_errors import add_error_handlers
from foredraft.server.api_routes import generation_routes, model_routes, token_routes
from foredraft.server.auth import AuthMiddleware
from foredraft.server.body_limit import BodyLimitMiddleware
from foredraft.server.request_log import RequestLogMiddleware
from foredraft.server.server_settings import ServerSettings
from foredraft.server.service import Service


def create_app(settings: ServerSettings, make_llm: Callable[[], LLM]) -> FastAPI:
    """make_llm loads the models; it is called when the application starts. `app.state.service` is the Service."""
    service = Service(settings, make_llm)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(
        title="foredraft",
        version=__version__,
        summary="Lossless speculative decoding behind the OpenAI API",
        lifespan=lifespan,
        docs_url=None,  # the pages of FastAPI load scripts from other sites
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},
        middleware=make_middleware(settings, service.metrics.http),
    )
    app.state.service = service
    add_error_handlers(app)
    # for the OpenAPI document only: AuthMiddleware checks the key
    security = [Depends(HTTPBearer(auto_error=False))] if settings.api_keys else []
    for make_routes in (generation_routes, model_routes, token_routes, operation_routes.operation_routes):
        app.include_router(make_routes(service), dependencies=security)
    app.include_router(operation_routes.health_routes(service))
    app.include_router(live.live_routes(service.live_observer))
    _amend_document(app, strict=settings.strict)
    return app


def make_middleware(settings: ServerSettings, http: Counter) -> list[Middleware]:
    """The middleware, outermost first. http: counts responses, by route and status."""
    limits = settings.limits
    origins = settings.allowed_origins
    cross_origin = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("X-Request-Id", "X-Foredraft-Ignored", "Retry-After"),
    )
    return [
        Middleware(RequestLogMiddleware, http=http),
        *([cross_origin] if origins else []),
        Middleware(
            AuthMiddleware,
            api_keys=settings.api_keys,
            allowed_hosts=settings.allowed_hosts,
            public_paths=operation_routes.PUBLIC_PATHS | live.PUBLIC_PATHS,
        ),
        Middleware(BodyLimitMiddleware, max_bytes=limits.max_body_bytes, seconds=limits.body_seconds),
    ]


def _amend_document(app: FastAPI, *, strict: bool) -> None:
    """Remove the 422 that FastAPI adds to every route with a body, since a 400 is sent instead. strict: say that requests have
    no fields other than the documented ones."""
    make_document = app.openapi

    def openapi() -> dict[str, Any]:
        document = make_document()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        if strict:
            for schema in document["components"]["schemas"].values():
                if schema.get("additionalProperties") is True:
                    schema["additionalProperties"] = False
        return document

    app.openapi = openapi  # type: ignore[method-assign]
