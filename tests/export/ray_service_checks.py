"""Run by the interpreter of an environment with Ray and vLLM: runs one service of exported configurations, and reports the answers of
each of its models. JSON on standard input and on the last line of standard output."""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

PORT = 18731
ON_A_PROCESSOR = {"placement_group_config": {"bundles": [{"CPU": 1}]}}
QUICK = {"max_model_len": 256, "enforce_eager": True}


def llm_config(name: str, config: dict[str, Any]) -> LLMConfig:
    """A configuration that runs on CPUs, with this name, and with only what the workers can import."""
    config.pop("runtime_env", None)
    config["model_loading_config"]["model_id"] = name
    config["engine_kwargs"] |= QUICK
    return LLMConfig(**config, **ON_A_PROCESSOR)


def answer(model: str, prompt: str) -> str:
    asked = {"model": model, "prompt": prompt, "max_tokens": 32, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        text: str = json.load(response)["choices"][0]["text"]
    return text


def main() -> None:
    asked = json.load(sys.stdin)
    ray.init(num_cpus=4 + 2 * len(asked["configs"]), include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"port": PORT})
    configs = [llm_config(name, config) for name, config in asked["configs"].items()]
    serve.run(build_openai_app({"llm_configs": configs}), route_prefix="/")
    answers = {name: answer(name, asked["prompt"]) for name in asked["configs"]}
    serve.shutdown()
    ray.shutdown()
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
