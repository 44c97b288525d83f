"""Run by vLLM's own interpreter: checks exported options, one JSON object on standard input and one on standard output."""

from __future__ import annotations

import json
import sys
from typing import Any


def said_of(model: str, options: dict[str, Any]) -> str:
    """ "" where vLLM's configuration classes take the options, else their complaint."""
    from vllm.engine.arg_utils import EngineArgs

    try:
        config = EngineArgs(model=model, max_model_len=256, **options).create_engine_config()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    wanted = options.get("speculative_config")
    found = config.speculative_config
    if (found is None) != (wanted is None):
        return f"it has {found}"
    if wanted is not None and found.num_speculative_tokens != wanted["num_speculative_tokens"]:
        return f"it drafts {found.num_speculative_tokens}"
    return ""


def ray_said_of(config: dict[str, Any]) -> str:
    """The same for an application's configuration for Ray Serve, which passes its options on to vLLM."""
    try:
        from ray.serve.llm import LLMConfig
    except ImportError as error:
        return f"no Ray: {error}"
    try:
        handed = LLMConfig(**config).get_engine_config().get_initialization_kwargs()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    wanted = config["engine_kwargs"]
    return "" if {key: handed.get(key) for key in wanted} == wanted else f"it hands on {handed}"


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    models = asked.get("models", {})
    answers = {name: said_of(models.get(name, asked["model"]), options) for name, options in asked["vllm"].items()}
    answers |= {f"ray {name}": ray_said_of(config) for name, config in asked.get("ray", {}).items()}
    print(json.dumps(answers))
