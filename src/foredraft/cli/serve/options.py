"""The options of the server, and the settings that they become."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from foredraft.cli.inputs import parse_bytes, parse_seconds, read_text
from foredraft.cli.serve.access import AccessOptions, AddressOptions
from foredraft.errors import ForedraftError

if TYPE_CHECKING:
    from foredraft.cli.models import ModelOptions
    from foredraft.server import RequestLimits, ServerSettings
    from foredraft.server.replicas import ClusterSettings

_NO_LIMIT = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """How requests are read and answered."""

    served_model_name: Annotated[
        list[str] | None,
        Option("--served-model-name", help="What clients call the model; repeatable. Default: the model's own."),
    ] = None
    chat_template: Annotated[
        Path | None, Option("--chat-template", help="A Jinja file to use instead of the checkpoint's template.")
    ] = None
    trust_request_chat_template: Annotated[
        bool,
        Option(
            "--trust-request-chat-template",
            help="Accept templates in requests. They can keep a thread busy for as long as they like.",
        ),
    ] = False
    tool_call_parser: Annotated[
        str,
        Option(
            "--tool-call-parser",
            help="The form in which the model calls tools: hermes, llama3_json or none; auto: detected from its chat template.",
        ),
    ] = "auto"
    strict: Annotated[
        bool, Option("--strict", help="Reject requests with unknown fields, instead of naming the fields in a header.")
    ] = False

    def names(self, target: str | None) -> tuple[str, ...]:
        """The names that clients may use. target: None: the embedded one."""
        if self.served_model_name:
            if not all(self.served_model_name):
                raise ForedraftError("a --served-model-name is empty: give a name, or leave the option out")
            return tuple(self.served_model_name)
        if target is None:
            return ("foredraft",)
        path = Path(target)
        if path.is_file():  # a GGUF file
            return (path.stem,)
        return (path.resolve().name if path.is_dir() else target,)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    max_num_seqs: Annotated[int, Option("--max-num-seqs", min=1, help="Texts that are generated at a time.")] = 64
    max_num_batched_tokens: Annotated[
        int, Option("--max-num-batched-tokens", min=1, help="Rows of one pass; longer prompts are read in pieces.")
    ] = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """Limits on what a client may use, for the sake of the others."""

    max_queue: Annotated[
        int,
        Option("--max-queue", min=0, help="Texts that may wait while the engine is full; more are answered with 429."),
    ] = 256
    max_body: Annotated[str, Option("--max-body", help="The largest request; larger ones are answered with 413.")] = (
        "2MiB"
    )
    max_connections: Annotated[
        int, Option("--max-connections", min=1, help="Connections open at a time; idle ones make room for new ones.")
    ] = 1024
    max_prompt_tokens: Annotated[
        int | None, Option("--max-prompt-tokens", min=1, help="The longest prompt. Default: the context length.")
    ] = None
    request_timeout: Annotated[
        str, Option("--request-timeout", help="The longest that a request may take, such as 90s or 10m, or none.")
    ] = "10m"
    drain_timeout: Annotated[
        str, Option("--drain-timeout", help="The longest that a shutdown may take, such as 30s, or none.")
    ] = "5m"

    @property
    def drain_seconds(self) -> float | None:
        return _seconds_or_none(self.drain_timeout)

    def limits(self) -> RequestLimits:
        """Raises ForedraftError for a value that cannot be read or is out of range."""
        max_body_bytes, request_seconds = parse_bytes(self.max_body), _seconds_or_none(self.request_timeout)
        from foredraft.server import RequestLimits

        return RequestLimits(
            max_body_bytes=max_body_bytes,
            max_prompt_tokens=self.max_prompt_tokens,
            max_queue=self.max_queue,
            max_connections=self.max_connections,
            request_seconds=request_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DisplayOptions:
    """What the live page and the log show."""

    show_text: Annotated[
        bool | None,
        Option(
            "--show-text/--no-show-text",
            help="Show prompts and texts on the live page. Default: on the loopback address only.",
        ),
    ] = None
    log_prompts: Annotated[bool, Option("--log-prompts", help="Put prompts and texts into the log.")] = False
    log_level: Annotated[str, Option("--log-level", help="debug, info, warning or error.")] = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """Several engines on Ray Serve."""

    replicas: Annotated[
        int | None,
        Option(min=1, help="Number of engines, each in its own process, on Ray Serve (pip install 'foredraft[ray]')."),
    ] = None
    max_replicas: Annotated[
        int | None, Option("--max-replicas", min=1, help="The most engines to start under load. Default: --replicas.")
    ] = None
    ray_address: Annotated[
        str | None,
        Option(
            "--ray-address",
            help="A Ray cluster to run them on, such as 10.0.0.1:6379 or auto. Default: only this machine.",
        ),
    ] = None

    def cluster(self, models: ModelOptions, max_num_seqs: int) -> ClusterSettings | None:
        """None without --replicas. Raises ForedraftError for options that need or exclude it."""
        if self.replicas is None:
            for option, value in (("--max-replicas", self.max_replicas), ("--ray-address", self.ray_address)):
                if value is not None:
                    raise ForedraftError(f"{option} is for several replicas: give --replicas too")
            return None
        for option, value in (("--device-map", models.device_map), ("--tp-plan", models.tp_plan)):
            if value is not None:
                raise ForedraftError(f"{option} spreads one engine over several devices: leave --replicas out")
        if ":" in models.device:
            raise ForedraftError(
                f"--device {models.device}: Ray gives each replica a device of its own: give --device cuda"
            )
        from foredraft.server.replicas import ClusterSettings

        return ClusterSettings(
            num_replicas=self.replicas,
            max_replicas=self.max_replicas,
            num_threads=models.settings().num_threads,
            max_num_seqs=max_num_seqs,
            address=self.ray_address,
            uses_gpus=models.device != "cpu",
        )


def server_settings(
    target: str | None,
    address: AddressOptions,
    access: AccessOptions,
    requests: RequestOptions,
    limits: LimitOptions,
    display: DisplayOptions,
) -> ServerSettings:
    """Raises ForedraftError for a value that cannot be used."""
    keys, template = access.keys(address), requests.chat_template
    from foredraft.server import ServerSettings
    from foredraft.server.auth import LOOPBACK_HOSTS

    return ServerSettings(
        model_names=requests.names(target),
        api_key=keys or None,
        allowed_hosts=None if keys else LOOPBACK_HOSTS,
        allowed_origins=access.origins(),
        chat_template=None if template is None else read_text(template),
        trust_request_chat_template=requests.trust_request_chat_template,
        limits=limits.limits(),
        log_prompts=display.log_prompts,
        strict=requests.strict,
        tool_call_parser=requests.tool_call_parser,
        show_text=address.is_loopback if display.show_text is None else display.show_text,
    )


def _seconds_or_none(duration: str) -> float | None:
    return None if duration == _NO_LIMIT else parse_seconds(duration)
