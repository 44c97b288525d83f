"""BentoML: a service that runs vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foredraft.export import vllm
from foredraft.export.choice import Choice
from foredraft.export.engine import Engine
from foredraft.export.render import Code, command_words

TITLE, VERSION = "BentoML", f"1.4 with vLLM {vllm.VERSION}"

_SERVICE = """import bentoml

# of vLLM's own server, to which BentoML hands requests on
VLLM_PORT = 8000


@bentoml.service(
    name="vllm",
    endpoints={"livez": "/health", "readyz": "/health"},
    http={"proxy_port": VLLM_PORT},
)
class VLLM:
    def __command__(self) -> list[str]:
        return [
            %s,
        ]
"""
_PORT = Code("str(VLLM_PORT)")


def render(choice: Choice, fields: Mapping[str, Any]) -> str:
    words = ["vllm", "serve", choice.target, *command_words(fields), "--port", _PORT]
    return _SERVICE % ",\n            ".join(map(repr, words))


ENGINE = Engine("bentoml", TITLE, VERSION, vllm.METHODS, vllm.WHY_NOT, render, vllm.COMBINATIONS, vllm.HEADS)
