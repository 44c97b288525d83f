"""OpenVINO GenAI: Python."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foredraft.export.choice import Choice
from foredraft.export.differences import CONVERTED, FIXED, GREEDY_DRAFTS
from foredraft.export.engine import NO_COPY, WITHOUT_HEADS, Engine, Translate, Translation, num_tokens
from foredraft.export.render import Code, as_call

TITLE, VERSION = "OpenVINO GenAI", "2026.4"

_MODEL_FILE = "openvino_model.xml"
PER_PIPELINE = "The method is set for the pipeline; the number of draft tokens is set for each request."
LOOKUP = "OpenVINO's lookup chooses its own occurrence of the last three tokens, and drafts the tokens up to the end of the text."

PRECISION = (
    "In OpenVINO's default precision (bfloat16, keys and values in 8 bits), speculation can change greedy text; with "
    'INFERENCE_PRECISION_HINT and KV_CACHE_PRECISION set to "f32" it did not.'
)


def draft_model(choice: Choice) -> Translation:
    draft = Code(f"openvino_genai.draft_model({_draft_folder(choice)!r}, 'CPU')")
    return Translation(
        {"pipeline": {"draft_model": draft}, "request": {"num_assistant_tokens": num_tokens(choice, TITLE)}},
        (GREEDY_DRAFTS, PRECISION, FIXED, PER_PIPELINE, CONVERTED),
    )


def ngram(choice: Choice) -> Translation:
    request = {"num_assistant_tokens": num_tokens(choice, TITLE), "max_ngram_size": 3}
    return Translation(
        {"pipeline": {"prompt_lookup": True}, "request": request}, (LOOKUP, PRECISION, FIXED, PER_PIPELINE, CONVERTED)
    )


def render(choice: Choice, fields: Mapping[str, Any]) -> str:
    """The pipeline, and the configuration for its `generate`, after the commands that convert models that are not converted yet."""
    folders = {choice.target: _folder(choice.target)}
    if choice.draft is not None:
        folders[choice.draft] = _draft_folder(choice)
    commands = [f"# {shlex.join(_conversion(*pair))}" for pair in folders.items() if not _is_converted(pair[0])]
    pipeline = as_call("openvino_genai.LLMPipeline", _folder(choice.target), "CPU", **fields.get("pipeline", {}))
    lines = [*commands, "import openvino_genai", "", f"pipeline = {pipeline}"]
    lines += ["request = openvino_genai.GenerationConfig()", "request.max_new_tokens = 128"]
    lines += [f"request.{name} = {value!r}" for name, value in fields.get("request", {}).items()]
    lines += ["# pipeline.generate(prompt, request)"]
    return "\n".join(lines) + "\n"


def _is_converted(name: str) -> bool:
    return (Path(name) / _MODEL_FILE).exists()


def _folder(name: str) -> str:
    """The folder of the converted model, whether it exists yet or not."""
    return name if _is_converted(name) else f"{Path(name).name}-openvino"


def _draft_folder(choice: Choice) -> str:
    """The same for the draft model, which must not overwrite a target of the same name."""
    draft, folder = choice.draft_model, _folder(choice.draft_model)
    if draft != choice.target and folder == _folder(choice.target):
        return f"{Path(draft).name}-draft-openvino"
    return folder


def _conversion(name: str, folder: str) -> tuple[str, ...]:
    return ("optimum-cli", "export", "openvino", "--model", name, "--task", "text-generation-with-past", folder)


METHODS: Mapping[str, Translate] = MappingProxyType({"draft_model": draft_model, "ngram": ngram})
_HEAD = "heads trained here are not converted to its format; the nearest alternative is --method draft_model"
_COPY = f"{NO_COPY} an int8 conversion of it as --draft-model, with --method draft_model"
WHY_NOT: Mapping[str, str] = MappingProxyType(
    {
        **WITHOUT_HEADS,
        "eagle": _HEAD,
        "self-int8": _COPY,
        "self-int4": _COPY,
    }
)

ENGINE = Engine("openvino", TITLE, VERSION, METHODS, WHY_NOT, render, plain=Translation({}, (CONVERTED,)))
