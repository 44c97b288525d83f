"""The live page, which shows what the engine is doing: an observer, a broadcaster of frames, and the routes."""

from foredraft.server.live.observer import LiveObserver
from foredraft.server.live.page_routes import PUBLIC_PATHS, live_routes

__all__ = ["PUBLIC_PATHS", "LiveObserver", "live_routes"]
