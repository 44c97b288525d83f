"""Prompts that several benchmarks use."""

from __future__ import annotations

import gzip
import json
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.common.paths import SHARED


def code_prompts(count: int, data: Path = SHARED / "data") -> list[str]:
    """MBPP tasks as a programmer would begin them: the `def` line of the solution, and the task as its docstring.

    Prompts have no trailing newline: newline and indentation are one token of the embedded pair, and it never saw a text
    that was cut between them in training.
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


def conversation_starts(count: int | None, data: Path = SHARED / "data") -> list[str]:
    """The first turns of MT-bench's questions, taking one of each category in turn. count: None for all."""
    categories: dict[str, list[str]] = {}
    for line in (data / "prompts" / "mt_bench.jsonl").read_text().splitlines():
        question = json.loads(line)
        categories.setdefault(question["category"], []).append(question["turns"][0])
    in_turns = [text for row in zip_longest(*categories.values()) for text in row if text is not None]
    return in_turns[:count]


def chat_ids(tokenizer: Any, count: int, file: Path | None = None) -> list[list[int]]:
    """Token ids of the first turns of MT-bench's questions, or of the "text" of each line of a .jsonl file, in the model's chat template."""
    questions = conversation_starts(count) if file is None else texts_of(file)[:count]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in questions
    ]


def texts_of(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]
