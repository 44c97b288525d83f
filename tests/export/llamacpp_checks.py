"""Run by the interpreter that has llama.cpp's server as a library: runs it with exported arguments, JSON in and out.

The library has no argument parser: for each argument the field that llama.cpp's own parser sets is set.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Callable
from typing import Any

import xllamacpp


def set_types(parameters: Any, names: str) -> None:
    kinds = xllamacpp.common_speculative_type
    known = [f"COMMON_SPECULATIVE_TYPE_{name.replace('-', '_').upper()}" for name in names.split(",")]
    parameters.speculative.types = [getattr(kinds, name) for name in known]


def set_field(path: str) -> Callable[[Any, Any], None]:
    """Set a field. path: of attributes, starting at the parameters. Raises AttributeError for a missing one."""

    def assign(parameters: Any, value: Any) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            parameters = getattr(parameters, parent)
        getattr(parameters, name)
        setattr(parameters, name, value)

    return assign


FIELDS: dict[str, Callable[[Any, Any], None]] = {
    "model": set_field("model.path"),
    "model_draft": set_field("speculative.draft.mparams.path"),
    "spec_type": set_types,
    "spec_draft_n_max": set_field("speculative.draft.n_max"),
    "spec_ngram_simple_size_n": set_field("speculative.ngram_simple.size_n"),
    "spec_ngram_simple_size_m": set_field("speculative.ngram_simple.size_m"),
}


def answers(options: dict[str, Any], prompts: list[list[int]]) -> list[dict[str, Any]]:
    """The greedy answers of a server with these arguments."""
    parameters = xllamacpp.CommonParams()
    parameters.n_ctx, parameters.n_parallel = 512, 1
    parameters.fit_params, parameters.offline, parameters.ui = False, True, False
    draft = parameters.speculative.draft
    for threads in (parameters.cpuparams, parameters.cpuparams_batch, draft.cpuparams, draft.cpuparams_batch):
        threads.n_threads, threads.poll = 1, 0  # other tests run at the same time
    for name, value in options.items():
        FIELDS[name](parameters, value)
    server = xllamacpp.Server(parameters)
    return [ask(server.listening_address, prompt) for prompt in prompts]


def ask(url: str, prompt: list[int]) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": 32, "temperature": 0, "return_tokens": True, "cache_prompt": False}
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = json.load(answer)
    return {"tokens": found["tokens"], "drafted": found["timings"].get("draft_n", 0)}


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps({name: answers(options, asked["prompts"]) for name, options in asked["options"].items()}))
