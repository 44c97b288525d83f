"""The HTTP API as types: requests, responses, and pure functions that convert between them and the engine's types.

No sockets and no I/O.
"""
