"""An HTTP server for the engine, with OpenAI's API.

One thread owns the engine (AsyncLLM). `service` starts and stops it and admits requests, `wire` has the types of requests and
responses, `prompt_processor` creates engine requests, `generation_response` runs them and sends their texts, and `*_routes` are
the routes. `app` puts these together, and `http_server` runs the application on a socket.
"""

from foredraft.server.app import create_app
from foredraft.server.server_settings import RequestLimits, ServerSettings

__all__ = ["RequestLimits", "ServerSettings", "create_app"]
