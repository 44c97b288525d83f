"""HTTP/1.1 on connections, with limits that hold before a key is checked.

`parser` bounds and checks what h11 reads, `read_buffer` feeds it in small chunks, `connections` bounds how many connections are
open, `cycle_transport` lets a connection decide how it closes, and `limited_protocol` is uvicorn's protocol with these and with
time limits. Only the last one depends on uvicorn.
"""

from foredraft.server.http.limited_protocol import LimitedProtocol, make_protocol

__all__ = ["LimitedProtocol", "make_protocol"]
