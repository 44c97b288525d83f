"""Fixtures that the tests of several commands share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from foredraft import LLM
from foredraft.model import EMBEDDED

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_threads=1)


@pytest.fixture
def template(tmp_path: Path) -> Path:
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    return file


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded target as a checkpoint with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "target"
    shutil.copytree(EMBEDDED / "target", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
