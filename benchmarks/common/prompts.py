"""Prompts that several benchmarks use."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.common.paths import SHARED
from foredraft.train.corpus import read_file


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


def mt_bench_turns(count: int | None, data: Path = SHARED / "data") -> list[list[str]]:
    """Both turns of each of MT-bench's questions, taking one of each category in turn. count: None for all."""
    categories: dict[str, list[list[str]]] = {}
    for line in (data / "prompts" / "mt_bench.jsonl").read_text().splitlines():
        question = json.loads(line)
        categories.setdefault(question["category"], []).append(question["turns"])
    in_order = [turns for row in zip_longest(*categories.values()) for turns in row if turns is not None]
    return in_order[:count]


def conversation_starts(count: int | None, data: Path = SHARED / "data") -> list[str]:
    """The first turns of MT-bench's questions. count: None for all."""
    return [turns[0] for turns in mt_bench_turns(count, data)]


def questions_of(file: Path | None, count: int) -> Sequence[str]:
    """The first questions of a file, as training reads them; None: MT-bench's."""
    return conversation_starts(count) if file is None else read_file(file, separator="\n").documents[:count]


def chat_ids(tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of the first turns of MT-bench's questions, in the model's chat template."""
    return question_ids(tokenizer, conversation_starts(count))


def question_ids(tokenizer: Any, questions: Sequence[str]) -> list[list[int]]:
    """Token ids of questions, in the model's chat template."""
    return [message_ids(tokenizer, [{"role": "user", "content": question}]) for question in questions]


def message_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation that awaits the assistant's next answer, in the model's chat template."""
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids
