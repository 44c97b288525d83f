"""Prompts that benchmarks share."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from benchmarks.common.paths import SHARED


def code_prompts(count: int, data: Path = SHARED / "data") -> list[str]:
    """MBPP tasks as a person would begin to write them: the `def` line of the solution and the task as its docstring.

    No trailing newline: newline and indentation are one token of the embedded pair, and a prompt that ends between them
    is one it never saw.
    """
    prompts = []
    for line in (data / "prompts" / "mbpp.jsonl").read_text().splitlines():
        task = json.loads(line)
        definition = next((row.rstrip() for row in task["code"].splitlines() if row.startswith("def ")), None)
        if definition is not None:
            prompts.append(f'{definition}\n    """{task["text"].strip()}"""')
        if len(prompts) == count:
            break
    return prompts


def story_prompts(count: int, data: Path = SHARED / "data", num_words: int = 12) -> list[str]:
    """The first words of stories that neither model was trained on."""
    text = gzip.decompress((data / "corpus" / "tinystories_val.txt.gz").read_bytes()).decode()
    stories = [story.split() for story in text.split("<|endoftext|>")]
    return [" ".join(words[:num_words]) for words in stories if len(words) > num_words][:count]
