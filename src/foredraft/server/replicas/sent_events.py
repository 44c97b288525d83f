"""What the front remembers of a stream, to end it as its route would if its replica cannot."""

from __future__ import annotations

from foredraft.server.api_errors import ApiError, error_event
from foredraft.server.wire.responses_response import ResponseEvent, failure_events


class SentEvents:
    """The events of one stream that were sent."""

    def __init__(self) -> None:
        self._first = b""
        self._num_events = 0

    def add(self, events: bytes) -> None:
        """events: whole ones, each followed by an empty line."""
        self._first = self._first or events.partition(b"\n\n")[0]
        self._num_events += events.count(b"\n\n")

    def failure(self, error: ApiError) -> bytes:
        """The events that report an error and end the stream."""
        name, _, data = self._first.partition(b"\n")
        if name != b"event: response.created":
            return error_event(error)
        response = ResponseEvent.model_validate_json(data.removeprefix(b"data: ")).response
        assert response is not None
        return b"".join(event.encode() for event in failure_events(response, error.error, self._num_events))
