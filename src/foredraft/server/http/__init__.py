"""HTTP/1.1 on a connection, within limits that hold before anybody has shown a key.

`parser` bounds and checks what h11 reads, `inlet` hands it on in small pieces, `connections` bounds how many are open, and
`protocol` is uvicorn's protocol with these and with limits of time. It alone knows uvicorn.
"""

from foredraft.server.http.protocol import make_protocol

__all__ = ["make_protocol"]
