"""h11's parser with limits on everything that it buffers, and with its errors as ApiErrors."""

from __future__ import annotations

from urllib.parse import urlsplit

import h11

from foredraft.server.api_errors import ApiError
from foredraft.server.server_settings import RequestLimits


class Parser(h11.Connection):
    """error: why the connection cannot continue, once there is a reason; from then on `next_event` returns no events."""

    def __init__(self, limits: RequestLimits) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=limits.max_header_bytes)
        self._limits = limits
        self._num_framing_bytes = 0
        self.error: ApiError | None = None

    @property
    def has_partial(self) -> bool:
        """Whether an incomplete event is buffered. Empty lines between requests do not count."""
        return bool(self.trailing_data[0].strip(b"\r\n"))

    def receive_data(self, data: bytes) -> None:
        """data: must not be empty."""
        if self.their_state is h11.IDLE and not self.trailing_data[0]:
            data = data.lstrip(b"\r\n")  # RFC 9112, 2.2
        if data:
            super().receive_data(data)
        self._num_framing_bytes += len(data)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.error is not None or (self.their_state is h11.IDLE and not self.has_partial):
            return h11.NEED_DATA
        state = self.their_state
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                event = self._check_request(event)
            elif isinstance(event, h11.Data):
                self._num_framing_bytes -= len(event.data)
            elif isinstance(event, h11.EndOfMessage):
                self._check_headers(list(event.headers.raw_items()))
            elif event is h11.NEED_DATA:
                self._check_partial()
        except h11.RemoteProtocolError as error:
            self.error = self._too_long(state) if error.error_status_hint == 431 else _bad_http(error)
        except ApiError as error:
            self.error = error
        return h11.NEED_DATA if self.error is not None else event

    def _check_request(self, request: h11.Request) -> h11.Request:
        """The request, with a path as its target. Raises ApiError."""
        if not request.http_version.startswith(b"1."):
            raise ApiError(505, "this server supports HTTP/1.1 only", code="bad_http")
        self._num_framing_bytes = len(self.trailing_data[0])
        if len(request.method) + len(request.target) + len(" HTTP/1.1 ") > self._limits.max_request_line_bytes:
            raise self._long_line()
        self._check_headers(list(request.headers.raw_items()))
        names = {name for name, _ in request.headers}
        if {b"content-length", b"transfer-encoding"} <= names:
            raise ApiError(400, "Content-Length and Transfer-Encoding contradict each other: send one of them")
        return request if request.target.startswith((b"/", b"*")) else _in_origin_form(request)

    def _check_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        limits = self._limits
        if len(headers) > limits.max_headers:
            raise _too_large(f"there are {len(headers)} header fields: at most {limits.max_headers} are allowed")
        if sum(len(name) + len(value) + len(": \r\n") for name, value in headers) > limits.max_header_bytes:
            raise self._long_headers()

    def _check_partial(self) -> None:
        """Check the limits of an event that is not complete yet."""
        if self.their_state is h11.IDLE and self._is_line_too_long():
            raise self._long_line()
        max_bytes = self._limits.max_body_bytes
        if self.their_state is h11.SEND_BODY and self._num_framing_bytes - len(self.trailing_data[0]) > max_bytes:
            message = f"the sizes and extensions of the body's chunks take up more than {max_bytes} bytes"
            raise ApiError(413, message, code="body_too_large")

    def _is_line_too_long(self) -> bool:
        max_bytes = self._limits.max_request_line_bytes
        start = self.trailing_data[0].lstrip(b"\r\n")[: max_bytes + 1]
        return len(start) > max_bytes and b"\n" not in start

    def _too_long(self, state: object) -> ApiError:
        """The error of a request line, headers, chunk header or trailers beyond h11's buffer limit. state: the client's state before."""
        return self._long_line() if state is h11.IDLE and self._is_line_too_long() else self._long_headers()

    def _long_line(self) -> ApiError:
        message = f"the request line is longer than {self._limits.max_request_line_bytes} bytes"
        return ApiError(414, message, code="request_line_too_long")

    def _long_headers(self) -> ApiError:
        return _too_large(f"the header fields take up more than {self._limits.max_header_bytes} bytes")


def _too_large(message: str) -> ApiError:
    return ApiError(431, message, code="headers_too_large")


def _bad_http(error: h11.RemoteProtocolError) -> ApiError:
    """Converts an error of h11, whose messages consist of constants and quotes from the request."""
    return ApiError(
        error.error_status_hint, f"this is not a valid HTTP/1.1 request: {str(error)[:200]}", code="bad_http"
    )


def _in_origin_form(request: h11.Request) -> h11.Request:
    """Converts a target of the form http://host/path, whose host replaces the Host header (RFC 9112, 3.2.2). Raises ApiError."""
    try:
        url = urlsplit(request.target)
    except ValueError:
        url = None
    if url is None or url.scheme not in (b"http", b"https") or not url.netloc:
        raise ApiError(400, "the request's target must be a path", code="bad_http")
    target = (url.path or b"/") + (b"?" + url.query if url.query else b"")
    headers = [pair for pair in request.headers if pair[0] != b"host"]
    return h11.Request(
        method=request.method,
        target=target,
        headers=[(b"host", url.netloc), *headers],
        http_version=request.http_version,
    )
