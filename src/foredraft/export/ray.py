"""Ray Serve: YAML for `serve run FILE`, an application that runs vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foredraft.export import vllm
from foredraft.export.choice import Choice
from foredraft.export.engine import Engine
from foredraft.export.render import as_yaml

TITLE, VERSION = "Ray Serve", f"2.60 with vLLM {vllm.VERSION}"


def render(choice: Choice, fields: Mapping[str, Any]) -> str:
    config: dict[str, Any] = {
        "model_loading_config": {"model_id": Path(choice.target).name, "model_source": choice.target},
        "engine_kwargs": dict(fields),
    }
    if "additional_config" in fields:  # the plug-in is part of foredraft, which must be installed where the workers run
        config["runtime_env"] = {"pip": ["foredraft"]}
    application = {
        "name": "llm",
        "route_prefix": "/",
        "import_path": "ray.serve.llm:build_openai_app",
        "args": {"llm_configs": [config]},
    }
    return as_yaml({"applications": [application]})


ENGINE = Engine("ray", TITLE, VERSION, vllm.METHODS, vllm.WHY_NOT, render, vllm.COMBINATIONS, vllm.HEADS)
