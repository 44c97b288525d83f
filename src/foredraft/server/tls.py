"""The certificate and keys for TLS."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from foredraft.errors import ForedraftError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files in PEM form. certfile: the certificate and its chain. keyfile: its private key; None: it is in certfile.
    ca_certs: if given, clients must have a certificate that one of these authorities signed."""

    certfile: Path
    keyfile: Path | None = None
    ca_certs: Path | None = None

    def check(self) -> None:
        """Raises ForedraftError if the files cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certfile, self.keyfile, password=_refuse_encrypted)
        except (OSError, ValueError) as error:
            files = f"{self.certfile} and {self.keyfile}" if self.keyfile else str(self.certfile)
            raise ForedraftError(
                f"{files}: no certificate in PEM format with its private key: {_reason(error)}"
            ) from None
        if self.ca_certs is not None:
            try:
                context.load_verify_locations(self.ca_certs)
            except (OSError, ValueError) as error:
                raise ForedraftError(f"{self.ca_certs}: no certificates in PEM format: {_reason(error)}") from None


def _refuse_encrypted() -> str:
    """Called for the password of an encrypted key, for which OpenSSL would otherwise ask on the terminal."""
    raise ValueError("the key is encrypted: give an unencrypted one that only the server can read")


def _reason(error: Exception) -> str:
    text = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return str(text).replace("_", " ").lower()
