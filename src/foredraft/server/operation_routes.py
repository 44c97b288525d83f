"""The routes for operating the server: its health, its version and its metrics. They answer HEAD too, as load balancers may ask."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from foredraft import __version__
from foredraft.server.api_errors import ApiError
from foredraft.server.route_docs import KEY_ERRORS, documented, documented_text
from foredraft.server.service import Service
from foredraft.server.wire.server_info import Status, Version

PUBLIC_PATHS = frozenset({"/health", "/ready"})
"""Paths that need no key: they reveal only whether the server is running."""


def health_routes(service: Service) -> APIRouter:
    """The routes that need no key."""
    router = APIRouter()

    @router.head("/health", include_in_schema=False)
    @router.get("/health", response_model=None, responses=documented(Status, {}))
    async def health() -> Response:
        if not service.is_alive:
            raise ApiError(503, "the engine has stopped", code="unavailable")
        return JSONResponse(Status(status="ok").model_dump())

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", response_model=None, responses=documented(Status, {}))
    async def ready() -> Response:
        service.engine  # noqa: B018  # raises 503 if there is none
        return JSONResponse(Status(status="ready").model_dump())

    return router


def operation_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.head("/version", include_in_schema=False)
    @router.get("/version", response_model=None, responses=documented(Version, KEY_ERRORS))
    async def version() -> Response:
        return JSONResponse(Version(version=__version__).model_dump())

    @router.head("/metrics", include_in_schema=False)
    @router.get("/metrics", response_model=None, responses=documented_text(KEY_ERRORS))
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router
