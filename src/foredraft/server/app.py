"""The application: routes around a service, behind the limits. No socket, no globals; any ASGI server may run it."""

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
from foredraft.server.auth import Gate
from foredraft.server.errors import add_error_handlers
from foredraft.server.limits import BodyLimit
from foredraft.server.live import PUBLIC_PATHS, live_routes
from foredraft.server.logging import Watch
from foredraft.server.routes import PUBLIC, api_routes, operation_routes, state_routes, token_routes
from foredraft.server.service import Service
from foredraft.server.settings import ServerSettings


def create_app(settings: ServerSettings, make_llm: Callable[[], LLM]) -> FastAPI:
    """make_llm is called when the application starts. `app.state.service` is the Service."""
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
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},
        middleware=guards(settings, service.metrics.http),
    )
    app.state.service = service
    add_error_handlers(app)
    guarded = (
        [Depends(HTTPBearer(auto_error=False))] if settings.api_keys else []
    )  # for the document; Gate is what guards
    for make_routes in (api_routes, token_routes, operation_routes):
        app.include_router(make_routes(service), dependencies=guarded)
    app.include_router(state_routes(service))
    app.include_router(live_routes(service.feed))
    _document(app, strict=settings.strict)
    return app


def guards(settings: ServerSettings, http: Counter) -> list[Middleware]:
    """What every request goes through, the first one first. http: counts answers, by route and status."""
    limits = settings.limits
    origins = settings.allowed_origins
    cross_origin = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("X-Request-Id",),
    )
    return [
        Middleware(Watch, http=http),
        *([cross_origin] if origins else []),
        Middleware(
            Gate, api_keys=settings.api_keys, allowed_hosts=settings.allowed_hosts, public=PUBLIC | PUBLIC_PATHS
        ),
        Middleware(BodyLimit, max_bytes=limits.max_body_bytes, seconds=limits.body_seconds),
    ]


def _document(app: FastAPI, *, strict: bool) -> None:
    """FastAPI adds a 422 wherever there is a body; here that is a 400. strict: requests have no other fields than these."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        document = make()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        if strict:
            for schema in document["components"]["schemas"].values():
                if schema.get("additionalProperties") is True:
                    schema["additionalProperties"] = False
        return document

    app.openapi = openapi  # type: ignore[method-assign]
