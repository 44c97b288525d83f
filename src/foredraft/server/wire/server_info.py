"""Responses about the server: its models, version and state."""

from __future__ import annotations

from typing import Literal

from foredraft.server.wire.models import ResponseModel


class ModelCard(ResponseModel):
    """max_model_len: tokens of the prompt and the output together. root: the first name of the served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "foredraft"
    root: str
    max_model_len: int


class ModelList(ResponseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Version(ResponseModel):
    version: str


class Status(ResponseModel):
    status: str
