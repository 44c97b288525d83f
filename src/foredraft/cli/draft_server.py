"""foredraft draft-server"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from foredraft.cli.app import app
from foredraft.cli.groups import option_groups
from foredraft.cli.inputs import parse_bytes
from foredraft.cli.models import DeviceOption, DtypeOption, ThreadsOption
from foredraft.draft_server import check_method
from foredraft.errors import ForedraftError
from foredraft.model.checkpoint import refuse_unusable
from foredraft.remote import read_key
from foredraft.utils import arguments, startup

if TYPE_CHECKING:
    from foredraft.draft_server import DraftServerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOptions:
    """The drafter."""

    draft_model: Annotated[str | None, Option("--draft-model", help="Hub id, directory or GGUF file.")] = None
    method: Annotated[
        str | None,
        Option(help="draft_model, pard, suffix or ngram. Default: what --draft-model is for, else suffix."),
    ] = None
    cache_memory: Annotated[
        str | None,
        Option(
            "--cache-memory", help="Memory for the draft model's KV cache, such as 4GiB. Default: half of what is free."
        ),
    ] = None
    dtype: DtypeOption = "auto"
    quantization: Annotated[str | None, Option(help="int8, int4 or int4-all. Default: none.")] = None
    device: DeviceOption = "auto"
    revision: Annotated[str | None, Option(help="Branch, tag or commit on the hub.")] = None
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Run code that comes with the checkpoint.")
    ] = False
    num_threads: ThreadsOption = None

    def settings(self) -> DraftServerSettings:
        """Raises ForedraftError for options that can be rejected before anything is loaded."""
        arguments.check_threads(self.num_threads)
        arguments.check_precision(self.dtype, self.quantization, None)
        if self.draft_model is not None:
            refuse_unusable(self.draft_model, has_weights=True)
        check_method(self.method, has_draft_model=self.draft_model is not None)
        from foredraft.draft_server import DraftServerSettings
        from foredraft.model import LoadOptions

        options = LoadOptions(self.dtype, self.device, self.revision, self.trust_remote_code, self.quantization)
        memory = None if self.cache_memory is None else parse_bytes(self.cache_memory)
        return DraftServerSettings(self.draft_model, self.method, options, memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListeningOptions:
    """Where the server listens, and which clients may use it."""

    host: Annotated[str, Option(help="Where to listen; 0.0.0.0 for other machines.")] = "127.0.0.1"
    port: Annotated[int, Option(min=0, max=65535, help="0 takes any free port.")] = 5757
    key_file: Annotated[
        Path | None,
        Option(
            "--key-file", metavar="FILE", help="The key, which clients must have too. Default: FOREDRAFT_DRAFT_KEY."
        ),
    ] = None
    ray: Annotated[
        bool,
        Option("--ray", help="Let Ray place the server, and restart it if it ends (pip install 'foredraft[ray]')."),
    ] = False
    ray_address: Annotated[
        str | None,
        Option(
            "--ray-address", help="A Ray cluster for --ray, such as 10.0.0.1:6379 or auto. Default: only this machine."
        ),
    ] = None

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    def check(self) -> None:
        if self.ray_address is not None and not self.ray:
            raise ForedraftError("--ray-address is for a supervised server: give --ray too")
        if self.ray and not self.port:
            raise ForedraftError("--port 0 cannot be used with --ray: clients find a restarted server at the same port")


@app.command("draft-server")
@option_groups
def draft_server(drafter: DrafterOptions, listening: ListeningOptions) -> None:
    """Draft for targets in other processes, on this machine or another one.

    Targets connect with --draft-server tcp://HOST:PORT and the same key;
    several may share one draft server. Texts never depend on it.
    docs/guides/remote-drafts.md says when it pays off.
    """
    listening.check()
    key = read_key(listening.key_file)
    settings = drafter.settings()
    if listening.ray:
        _run_supervised(settings, listening, key, drafter.num_threads)
    else:
        _run(settings, listening, key, drafter.num_threads)


def _run(settings: DraftServerSettings, listening: ListeningOptions, key: bytes, num_threads: int | None) -> None:
    from foredraft.draft_server.kept import KeptServer

    startup.ready()
    server = KeptServer(settings, listening.address, key, num_threads)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    _say(server.address)
    try:
        server.keep()
    finally:
        server.stop()


def _run_supervised(
    settings: DraftServerSettings, listening: ListeningOptions, key: bytes, num_threads: int | None
) -> None:
    from foredraft.draft_server.supervised import supervised_server

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with supervised_server(
        settings, listening.address, key, cluster=listening.ray_address, num_threads=num_threads
    ) as actor:
        import ray

        _say(ray.get(actor.address.remote()))
        while True:
            signal.pause()


def _say(address: str) -> None:
    typer.echo(f"drafting at {address}", err=True)
