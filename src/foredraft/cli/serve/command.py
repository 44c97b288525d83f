"""The command: from the options to a running server."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from foredraft.cli.app import app
from foredraft.cli.groups import option_groups
from foredraft.cli.models import ModelOptions
from foredraft.cli.serve.access import AccessOptions, AddressOptions
from foredraft.cli.serve.logs import log_to_standard_error, parse_level
from foredraft.cli.serve.options import (
    DisplayOptions,
    EngineOptions,
    LimitOptions,
    ReplicaOptions,
    RequestOptions,
    server_settings,
)
from foredraft.errors import ForedraftError

if TYPE_CHECKING:
    from foredraft.llm import LLM
    from foredraft.settings import Settings


@app.command()
@option_groups
def serve(
    models: ModelOptions,
    address: AddressOptions,
    access: AccessOptions,
    requests: RequestOptions,
    engine: EngineOptions,
    limits: LimitOptions,
    display: DisplayOptions,
    replicas: ReplicaOptions,
) -> None:
    """Serve the OpenAI API, metrics, and a live page at /.

    The log goes to standard error, a line of JSON for each request.
    Ctrl-C (or SIGTERM) lets the running texts finish; a second one
    aborts them. docs/guides/serving.md describes what is served.
    """
    level, drain_seconds = parse_level(display.log_level), limits.drain_seconds
    models.check()
    models.follow(**asdict(engine))
    settings = server_settings(models.target, address, access, requests, limits, display)
    tls = access.tls()
    cluster = replicas.cluster(models, engine.max_num_seqs)
    from foredraft.server import create_app
    from foredraft.server.http_server import listen, serve
    from foredraft.server.request_log import log_event

    with listen(address.host, address.port) as listener, ExitStack() as stack:
        if cluster is None:
            llm = _load(models, asdict(engine))
            application = create_app(settings, lambda: llm)
            log_to_standard_error(level)
        else:
            from foredraft.server.replicas import create_front, running_replicas

            log_to_standard_error(level)
            make_llm = partial(_load_in_replica, models, models.settings(), asdict(engine))
            application = create_front(settings, stack.enter_context(running_replicas(cluster, settings, make_llm)))
        url = address.url(listener.getsockname()[1], is_https=tls is not None)
        log_event("listening", url=url, models=settings.model_names, needs_key=bool(settings.api_keys))
        serve(application, listener, drain_seconds=drain_seconds, tls=tls)


def _load_in_replica(models: ModelOptions, settings: Settings, engine: dict[str, Any], num_threads: int) -> LLM:
    """settings: of the file and the options together, since a replica may run where the file does not exist."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "foredraft.toml"
        settings.write(file)
        return _load(replace(models, settings_file=file, num_threads=num_threads), engine)


def _load(models: ModelOptions, engine: dict[str, Any]) -> LLM:
    """Raises ForedraftError for a model that reads audio, which a request cannot contain."""
    llm = models.load(**engine)
    if llm.target.traits.feature_shape is not None:
        raise ForedraftError(
            f"{llm.target.traits.name} reads audio, not text, but a request has only text: use LLM.generate"
        )
    return llm
