"""The wire: requests and answers as types, and pure functions between them and the engine's own. No sockets, no waiting."""
