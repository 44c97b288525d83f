"""The engine as a service that speaks OpenAI's API.

One thread owns the engine (AsyncLLM); `service` says when it starts and ends and who is let in; `wire` holds requests and answers
as types; `reply` sends what is written; `routes` are thin. `app` puts them together, `run` gives them a socket.
"""

from foredraft.server.app import create_app
from foredraft.server.settings import RequestLimits, ServerSettings

__all__ = ["RequestLimits", "ServerSettings", "create_app"]
