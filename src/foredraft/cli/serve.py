"""foredraft serve"""

from __future__ import annotations

import ipaddress
import logging
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli.app import app
from foredraft.cli.inputs import read_text, seconds_of
from foredraft.cli.options import (
    BatchInvariantOption,
    ConfigOption,
    DeviceOption,
    DraftOption,
    DraftQuantizationOption,
    DtypeOption,
    GammaOption,
    MaxMemoryOption,
    MethodOption,
    MinAcceptanceOption,
    ModelOption,
    Models,
    QuantizationOption,
    RevisionOption,
    ThreadsOption,
    TrustOption,
    num_bytes,
)
from foredraft.errors import ForedraftError

if TYPE_CHECKING:
    from foredraft.llm import LLM
    from foredraft.server import ServerSettings
    from foredraft.server.replicas import ClusterSettings

_NO_LIMIT = "none"


@app.command()
def serve(
    context: typer.Context,
    model: ModelOption = None,
    draft_model: DraftOption = None,
    method: MethodOption = None,
    speculative_tokens: GammaOption = None,
    settings_file: ConfigOption = None,
    min_acceptance_rate: MinAcceptanceOption = None,
    max_draft_memory: MaxMemoryOption = None,
    host: Annotated[str, typer.Option(help="Where to listen. Beyond this machine only with a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            envvar="FOREDRAFT_API_KEY",
            show_envvar=True,
            help="What clients must send as a bearer token. The variable keeps it out of the list of processes.",
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option("--served-model-name", help="What clients call the model; repeatable. Default: the model's own."),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option("--chat-template", help="A Jinja file, in the place of the checkpoint's template.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", min=1, help="Texts that are written at a time.")] = 64,
    max_num_batched_tokens: Annotated[
        int,
        typer.Option("--max-num-batched-tokens", min=1, help="Rows of one pass; longer prompts are read in pieces."),
    ] = 512,
    cache_memory: Annotated[
        str | None,
        typer.Option("--cache-memory", help="For keys and values, as 4GiB. Default: by context and free memory."),
    ] = None,
    max_queue: Annotated[
        int, typer.Option("--max-queue", min=0, help="Texts that may wait beyond that; more are answered 429.")
    ] = 256,
    max_body: Annotated[
        str, typer.Option("--max-body", help="The largest request; larger ones are answered 413.")
    ] = "2MiB",
    max_prompt_tokens: Annotated[
        int | None, typer.Option("--max-prompt-tokens", min=1, help="Default: what the context holds.")
    ] = None,
    request_timeout: Annotated[
        str, typer.Option("--request-timeout", help="The longest that a request may take, as 90s, 10m, or none.")
    ] = "10m",
    drain_timeout: Annotated[
        str, typer.Option("--drain-timeout", help="The longest that the end may take, as 30s, or none.")
    ] = "5m",
    show_text: Annotated[
        bool | None,
        typer.Option(
            "--show-text/--no-show-text",
            help="Prompts and texts on the live page. Default: on the loopback address only.",
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(min=1, help="Engines, each a process of its own, on Ray Serve (pip install 'foredraft[ray]')."),
    ] = None,
    max_replicas: Annotated[
        int | None, typer.Option("--max-replicas", min=1, help="As many as load may raise that to. Default: it stays.")
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray-address", help="A Ray cluster to run them on, as 10.0.0.1:6379 or auto. Default: this machine alone."
        ),
    ] = None,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Put prompts and texts into the log.")] = False,
    log_level: Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")] = "info",
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = None,
    draft_quantization: DraftQuantizationOption = None,
    device: DeviceOption = "auto",
    batch_invariant: BatchInvariantOption = False,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    num_threads: ThreadsOption = None,
) -> None:
    """Serve the OpenAI API, metrics, and a live page at /.

    The log goes to standard error, a line of JSON for each request.
    Ctrl-C (or SIGTERM) finishes what is being written; a second one ends
    it. docs/serving.md says what is served.
    """
    level = _log_level(log_level)
    models = Models.of(context)
    limits = {
        "max_body_bytes": num_bytes(max_body),
        "max_prompt_tokens": max_prompt_tokens,
        "max_queue": max_queue,
        "request_seconds": _seconds_or_none(request_timeout),
    }
    drain_seconds = _seconds_or_none(drain_timeout)
    _require_key(host, api_key)
    cache_bytes = None if cache_memory is None else num_bytes(cache_memory)
    from foredraft.server import RequestLimits, ServerSettings, create_app
    from foredraft.server.auth import LOOPBACK_HOSTS
    from foredraft.server.run import listen, serve

    settings = ServerSettings(
        model_names=tuple(served_model_name or (_default_name(models),)),
        api_key=api_key,
        allowed_hosts=LOOPBACK_HOSTS if api_key is None else None,
        chat_template=None if chat_template is None else read_text(chat_template),
        limits=RequestLimits(**limits),  # type: ignore[arg-type]
        log_prompts=log_prompts,
        show_text=_is_loopback(host) if show_text is None else show_text,
    )
    engine = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "cache_memory": cache_bytes,
    }
    cluster = _cluster(context, models)
    with listen(host, port) as listener, ExitStack() as stack:
        if cluster is None:
            llm = models.load(**engine)
            app = create_app(settings, lambda: llm)
            _log_to_standard_error(level)
        else:
            from foredraft.server.replicas import create_front, running_replicas

            _log_to_standard_error(level)
            make_llm = partial(_load_in_replica, models, engine)
            app = create_front(settings, stack.enter_context(running_replicas(cluster, settings, make_llm)))
        _announce(settings, host, listener.getsockname()[1])
        serve(app, listener, drain_seconds=drain_seconds)


def _cluster(context: typer.Context, models: Models) -> ClusterSettings | None:
    """None without --replicas."""
    given = context.params
    if given["replicas"] is None:
        for name in ("max_replicas", "ray_address"):
            if given[name] is not None:
                raise ForedraftError(f"--{name.replace('_', '-')} is for several replicas: give --replicas too")
        return None
    if ":" in models.device:
        raise ForedraftError(
            f"--device {models.device}: Ray gives each replica a device of its own: give --device cuda"
        )
    from foredraft.server.replicas import ClusterSettings

    return ClusterSettings(
        num_replicas=given["replicas"],
        max_replicas=given["max_replicas"],
        num_threads=models.num_threads,
        max_num_seqs=given["max_num_seqs"],
        address=given["ray_address"],
        uses_gpus=models.device != "cpu",
    )


def _load_in_replica(models: Models, engine: dict[str, Any], num_threads: int) -> LLM:
    return replace(models, num_threads=num_threads).load(**engine)


def _require_key(host: str, api_key: str | None) -> None:
    if api_key is None and not _is_loopback(host):
        raise ForedraftError(
            f"--host {host} can be reached from other machines: give --api-key, or set FOREDRAFT_API_KEY"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _default_name(models: Models) -> str:
    target = models.target
    if target is None:
        return "foredraft"
    return Path(target).resolve().name if Path(target).is_dir() else target


def _seconds_or_none(duration: str) -> float | None:
    return None if duration == _NO_LIMIT else seconds_of(duration)


def _log_level(name: str) -> int:
    levels = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
    if name not in levels:
        raise ForedraftError(f"--log-level must be one of {', '.join(levels)}, not {name!r}")
    return levels[name]


def _log_to_standard_error(level: int) -> None:
    """From now on every line is JSON, the engine's warnings and uvicorn's included."""
    from foredraft.server.logging import JsonLines

    handler = JsonLines(sys.stderr)
    for name, least in (("foredraft", level), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(least)
        logger.propagate = False


def _announce(settings: ServerSettings, host: str, port: int) -> None:
    from foredraft.server.logging import log

    address = f"[{host}]" if ":" in host else host
    log(
        "listening", url=f"http://{address}:{port}", models=settings.model_names, needs_key=settings.api_key is not None
    )
