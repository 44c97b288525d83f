"""The page that shows what the engine does now: an observer, a board of what is shown, and the routes."""

from foredraft.server.live.feed import LiveFeed
from foredraft.server.live.routes import PUBLIC_PATHS, live_routes

__all__ = ["PUBLIC_PATHS", "LiveFeed", "live_routes"]
