"""Where the server listens, and who may use it."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from foredraft.cli.keys import api_keys
from foredraft.errors import ForedraftError

if TYPE_CHECKING:
    from foredraft.server.tls import TlsFiles

_ACCESS = "Who may use it"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressOptions:
    host: Annotated[str, Option(help="Where to listen. Other machines can be served only with a key.")] = "127.0.0.1"
    port: Annotated[int, Option(min=0, max=65535, help="0 takes any free port.")] = 8000

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def url(self, port: int, *, is_https: bool) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if is_https else 'http'}://{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessOptions:
    """Who may use the server."""

    api_key: Annotated[
        list[str] | None,
        Option(
            "--api-key",
            help="A key, one of which clients must send as a bearer token; repeatable. Default: the lines of "
            "FOREDRAFT_API_KEY, which keeps them out of the list of processes.",
            rich_help_panel=_ACCESS,
        ),
    ] = None
    api_key_file: Annotated[
        Path | None, Option("--api-key-file", help="More keys, one per line.", rich_help_panel=_ACCESS)
    ] = None
    ssl_certfile: Annotated[
        Path | None, Option("--ssl-certfile", help="Use HTTPS, with this certificate (PEM).", rich_help_panel=_ACCESS)
    ] = None
    ssl_keyfile: Annotated[
        Path | None,
        Option(
            "--ssl-keyfile", help="The certificate's private key, if it is in another file.", rich_help_panel=_ACCESS
        ),
    ] = None
    ssl_ca_certs: Annotated[
        Path | None,
        Option(
            "--ssl-ca-certs",
            help="Answer only clients with a certificate that one of these authorities signed.",
            rich_help_panel=_ACCESS,
        ),
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        Option(
            "--allowed-origins",
            help="Web pages whose scripts may use the server, such as https://example.com, or *; repeatable. Default: none.",
            rich_help_panel=_ACCESS,
        ),
    ] = None

    def keys(self, address: AddressOptions) -> tuple[str, ...]:
        """Raises ForedraftError if other machines can reach the server and there is no key."""
        keys = api_keys(self.api_key, self.api_key_file)
        if not keys and not address.is_loopback:
            raise ForedraftError(
                f"--host {address.host} can be reached from other machines: give --api-key, or set FOREDRAFT_API_KEY"
            )
        return keys

    def tls(self) -> TlsFiles | None:
        """None without a certificate. Raises ForedraftError for files that cannot be used."""
        if self.ssl_certfile is None:
            if self.ssl_keyfile or self.ssl_ca_certs:
                raise ForedraftError("--ssl-keyfile and --ssl-ca-certs need a certificate: give --ssl-certfile too")
            return None
        from foredraft.server.tls import TlsFiles

        files = TlsFiles(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)
        files.check()
        return files

    def origins(self) -> tuple[str, ...]:
        """The origins. Each option is an origin, or a JSON list of them, as in vLLM."""
        origins: list[str] = []
        for text in self.allowed_origins or ():
            origins += _json_list(text) if text.startswith("[") else [text]
        return tuple(origins)


def _json_list(text: str) -> Sequence[str]:
    """The items of a JSON list; the text itself if it is not JSON."""
    try:
        items: Sequence[Any] = json.loads(text)
    except ValueError:
        return [text]
    return list(map(str, items))
