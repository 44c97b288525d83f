"""The base of the builders that turn the engine's outputs into responses, whole or streamed."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from foredraft.server.wire.error_body import ErrorBody, ErrorDetail
from foredraft.server.wire.models import ResponseModel
from foredraft.server.wire.sampling_fields import SamplingFields
from foredraft.server.wire.usage import Usage, metrics_of, usage_of
from foredraft.text.outputs import Delta, RequestOutput


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The fields that every chunk of a response begins with. created: seconds since 1970."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def new(cls, prefix: str, model: str, request_id: str | None = None) -> ResponseHead:
        """The id is the prefix and the request's id, or a random one."""
        return cls(f"{prefix}-{request_id or uuid4().hex}", model)


class ResponseBuilder(ABC):
    """Builds the response to one body, whole or as chunks of a stream.

    A stream is `first_chunks`, `chunks` of every delta, `last_chunks` and `end`. A stream that fails ends with
    `error_chunks` instead of the last two.
    """

    end = b"data: [DONE]\n\n"
    """The bytes after the last event of a stream that succeeded."""

    def __init__(self, body: SamplingFields, head: ResponseHead) -> None:
        self._head = head
        self._includes_usage, self._includes_metrics = body.includes_usage, bool(body.metrics)

    def first_chunks(self) -> list[ResponseModel]:
        """The chunks that are sent before there is any text."""
        return []

    @abstractmethod
    def chunks(self, index: int, delta: Delta) -> list[ResponseModel]:
        """index: the prompt of the body that the delta belongs to."""

    def last_chunks(self, outputs: Sequence[RequestOutput]) -> list[ResponseModel]:
        """The chunk after the texts, if the body asked for usage or metrics."""
        usage, metrics = usage_of(outputs) if self._includes_usage else None, self._metrics(outputs)
        return [self._summary_chunk(usage, metrics)] if usage or metrics else []

    def error_chunks(self, error: ErrorDetail) -> list[ResponseModel]:
        """The last chunks of a stream that failed after it had begun."""
        return [ErrorBody(error=error)]

    @abstractmethod
    def response(self, outputs: Sequence[RequestOutput]) -> ResponseModel:
        """The response of a body that does not stream."""

    def encode_event(self, chunk: ResponseModel) -> bytes:
        """A chunk as a server-sent event."""
        return b"data: " + chunk.model_dump_json().encode() + b"\n\n"

    @abstractmethod
    def _summary_chunk(self, usage: Usage | None, metrics: dict[str, Any] | None) -> ResponseModel:
        """A chunk without texts."""

    def _metrics(self, outputs: Sequence[RequestOutput]) -> dict[str, Any] | None:
        """None if the body did not ask for metrics."""
        return metrics_of(outputs) if self._includes_metrics else None
