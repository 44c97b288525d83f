"""What the server says of itself: models, version, state."""

from __future__ import annotations

from typing import Literal

from foredraft.server.wire.base import Answer


class ModelCard(Answer):
    """max_model_len: tokens of prompt and answer together. root: the name first given to the model served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "foredraft"
    root: str
    max_model_len: int


class ModelList(Answer):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Version(Answer):
    version: str


class Status(Answer):
    status: str
