"""HTTPS, with certificates made for the test."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest

from foredraft import LLM, ForedraftError
from foredraft.server.tls import TlsFiles
from tests.server.conftest import Running, running

_MAKE = [
    "openssl",
    "req",
    "-x509",
    "-newkey",
    "ec",
    "-pkeyopt",
    "ec_paramgen_curve:prime256v1",
    "-nodes",
    "-days",
    "2",
    "-addext",
    "subjectAltName=IP:127.0.0.1,DNS:localhost",
]


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Make a self-signed certificate and its key."""
    certfile, keyfile = folder / f"{name}.crt", folder / f"{name}.key"
    subprocess.run(
        [*_MAKE, "-subj", f"/CN={name}", "-keyout", keyfile, "-out", certfile],
        check=True,
        capture_output=True,
    )
    return certfile, keyfile


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("certificates")
    return {name: make_certificate(folder, name) for name in ("server", "friend", "stranger")}


@pytest.fixture(scope="module")
def secure(llm: LLM, files: dict[str, tuple[Path, Path]]) -> Iterator[Running]:
    with running(llm, tls=TlsFiles(*files["server"])) as found:
        yield found


def test_the_openai_client_speaks_https(secure: Running, files: dict[str, tuple[Path, Path]]) -> None:
    assert secure.url.startswith("https://")
    trusting = ssl.create_default_context(cafile=str(files["server"][0]))
    with openai.OpenAI(
        base_url=f"{secure.url}/v1", api_key="none", http_client=openai.DefaultHttpxClient(verify=trusting)
    ) as client:
        stream = client.completions.create(model="pair", prompt="Once", max_tokens=5, temperature=0, stream=True)
        text = "".join(chunk.choices[0].text for chunk in stream)
        whole = client.completions.create(model="pair", prompt="Once", max_tokens=5, temperature=0)
    assert text == whole.choices[0].text


def test_a_client_that_does_not_trust_the_certificate_refuses(secure: Running) -> None:
    with pytest.raises(httpx2.ConnectError, match=r"(?i)certificate"):
        httpx2.get(secure.url + "/health")


def test_plain_http_is_not_answered(secure: Running) -> None:
    with pytest.raises(httpx2.HTTPError):
        httpx2.get(secure.url.replace("https", "http") + "/health")


def test_only_clients_with_a_trusted_certificate_are_accepted(llm: LLM, files: dict[str, tuple[Path, Path]]) -> None:
    tls = TlsFiles(*files["server"], ca_certs=files["friend"][0])
    with running(llm, tls=tls) as server:
        for name, may in (("friend", True), ("stranger", False), (None, False)):
            context = ssl.create_default_context(cafile=str(files["server"][0]))
            if name is not None:
                context.load_cert_chain(*files[name])
            if may:
                assert httpx2.get(server.url + "/health", verify=context).status_code == 200
            else:
                with pytest.raises(httpx2.HTTPError):
                    httpx2.get(server.url + "/health", verify=context)


def test_unusable_files_are_named(tmp_path: Path, files: dict[str, tuple[Path, Path]]) -> None:
    certfile, keyfile = files["server"]
    encrypted = tmp_path / "encrypted.key"
    subprocess.run(
        ["openssl", "pkey", "-in", keyfile, "-aes256", "-passout", "pass:secret", "-out", encrypted],
        check=True,
        capture_output=True,
    )
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    for found, words in (
        (TlsFiles(tmp_path / "missing"), "no such file"),
        (TlsFiles(certfile), "private key"),
        (TlsFiles(certfile, files["friend"][1]), "mismatch"),
        (TlsFiles(certfile, encrypted), "the key is encrypted"),
        (TlsFiles(certfile, keyfile, empty), "no certificate"),
        (TlsFiles(certfile, keyfile, tmp_path / "missing"), "no such file"),
    ):
        with pytest.raises(ForedraftError, match=words) as caught:
            found.check()
        assert "\n" not in str(caught.value)
