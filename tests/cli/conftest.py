"""What tests of several commands share."""

from __future__ import annotations

from pathlib import Path

import pytest

from foredraft import LLM

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
