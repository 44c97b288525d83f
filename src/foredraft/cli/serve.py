"""foredraft serve"""

from __future__ import annotations

import ipaddress
import json
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli.app import app
from foredraft.cli.inputs import read_text, seconds_of
from foredraft.cli.keys import api_keys
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
    from foredraft.server.tls import TlsFiles

_NO_LIMIT = "none"
_ACCESS = "Who may use it"


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
        list[str] | None,
        typer.Option(
            "--api-key",
            help="What clients must send as a bearer token; repeatable. Default: the lines of FOREDRAFT_API_KEY, which "
            "keeps them out of the list of processes.",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="More keys, one a line.", rich_help_panel=_ACCESS)
    ] = None,
    ssl_certfile: Annotated[
        Path | None,
        typer.Option("--ssl-certfile", help="Speak HTTPS, with this certificate (PEM).", rich_help_panel=_ACCESS),
    ] = None,
    ssl_keyfile: Annotated[
        Path | None,
        typer.Option("--ssl-keyfile", help="Its private key, where it is in another file.", rich_help_panel=_ACCESS),
    ] = None,
    ssl_ca_certs: Annotated[
        Path | None,
        typer.Option(
            "--ssl-ca-certs",
            help="Answer only clients with a certificate that one of these vouches for.",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-origins",
            help="Web pages whose scripts may use the server, as https://example.com, or *; repeatable. Default: none.",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option("--served-model-name", help="What clients call the model; repeatable. Default: the model's own."),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option("--chat-template", help="A Jinja file, in the place of the checkpoint's template.")
    ] = None,
    trust_request_chat_template: Annotated[
        bool,
        typer.Option(
            "--trust-request-chat-template",
            help="Take templates that requests bring. They can keep a thread busy for as long as they like.",
        ),
    ] = False,
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
    max_connections: Annotated[
        int, typer.Option("--max-connections", min=1, help="That are open at a time; idle ones make place.")
    ] = 1024,
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
    tool_call_parser: Annotated[
        str,
        typer.Option(
            "--tool-call-parser",
            help="The form in which the model calls tools: hermes, llama3_json or none; auto: as its chat template shows.",
        ),
    ] = "auto",
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse requests with unknown fields, instead of a warning in a header.")
    ] = False,
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
    it. docs/guides/serving.md says what is served.
    """
    level = _log_level(log_level)
    models = Models.of(context)
    models.check()
    drain_seconds = _seconds_or_none(drain_timeout)
    settings = _settings(context, models)
    tls = _tls(ssl_certfile, ssl_keyfile, ssl_ca_certs)
    cache_bytes = None if cache_memory is None else num_bytes(cache_memory)
    from foredraft.server import create_app
    from foredraft.server.http_server import listen, serve

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
        _announce(settings, "http" if tls is None else "https", host, listener.getsockname()[1])
        serve(app, listener, drain_seconds=drain_seconds, tls=tls)


def _settings(context: typer.Context, models: Models) -> ServerSettings:
    """What the options ask for, models and engine aside."""
    given = context.params
    host, template, show_text = given["host"], given["chat_template"], given["show_text"]
    keys = api_keys(given["api_key"], given["api_key_file"])
    limits = {
        "max_body_bytes": num_bytes(given["max_body"]),
        "max_prompt_tokens": given["max_prompt_tokens"],
        "max_queue": given["max_queue"],
        "max_connections": given["max_connections"],
        "request_seconds": _seconds_or_none(given["request_timeout"]),
    }
    _require_key(host, keys)
    from foredraft.server import RequestLimits, ServerSettings
    from foredraft.server.auth import LOOPBACK_HOSTS

    return ServerSettings(
        model_names=tuple(given["served_model_name"] or (_default_name(models),)),
        api_key=keys or None,
        allowed_hosts=None if keys else LOOPBACK_HOSTS,
        allowed_origins=_origins(given["allowed_origins"] or ()),
        chat_template=None if template is None else read_text(template),
        trust_request_chat_template=given["trust_request_chat_template"],
        limits=RequestLimits(**limits),
        log_prompts=given["log_prompts"],
        strict=given["strict"],
        tool_call_parser=given["tool_call_parser"],
        show_text=_is_loopback(host) if show_text is None else show_text,
    )


def _origins(given: Sequence[str]) -> tuple[str, ...]:
    """vLLM takes them as a list in JSON; that is understood too."""
    found: list[str] = []
    for one in given:
        try:
            more = json.loads(one) if one.startswith("[") else [one]
        except ValueError:
            more = [one]
        found += map(str, more)
    return tuple(found)


def _tls(certfile: Path | None, keyfile: Path | None, ca_certs: Path | None) -> TlsFiles | None:
    """None without a certificate."""
    if certfile is None:
        if keyfile or ca_certs:
            raise ForedraftError("--ssl-keyfile and --ssl-ca-certs go with a certificate: give --ssl-certfile too")
        return None
    from foredraft.server.tls import TlsFiles

    files = TlsFiles(certfile, keyfile, ca_certs)
    files.check()
    return files


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


def _require_key(host: str, keys: Sequence[str]) -> None:
    if not keys and not _is_loopback(host):
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
    from foredraft.server.request_log import JsonLinesHandler

    handler = JsonLinesHandler(sys.stderr)
    for name, least in (("foredraft", level), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(least)
        logger.propagate = False


def _announce(settings: ServerSettings, scheme: str, host: str, port: int) -> None:
    from foredraft.server.request_log import log_event

    address = f"[{host}]" if ":" in host else host
    log_event(
        "listening",
        url=f"{scheme}://{address}:{port}",
        models=settings.model_names,
        needs_key=bool(settings.api_keys),
    )
