"""Texts that the target writes, to train on, because a draft meets such texts in use. They are kept in a file, so that none is
written twice, however often the run is interrupted."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.sampling import SamplingParams
from foredraft.train.run_folder import writing

FILE = "generations.jsonl"
BATCH_SIZE = 64

WriteTexts = Callable[[Sequence[int]], list[list[int]]]
"""(the numbers of texts) -> the ids of each"""


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """number: of texts. temperatures: used in turn. prompt_len: tokens of a training text that each begins with, on average; 0 for
    answers to sources. max_tokens: the most that the target adds. seed: of the draws."""

    number: int
    temperatures: tuple[float, ...]
    prompt_len: int
    max_tokens: int
    seed: int = 0


def split_documents(documents: Sequence[Sequence[int]], length: int, first_id: int | None) -> list[list[int]]:
    """The documents cut into pieces of `length` tokens, each of which can be a prompt. So kinds of text are weighted by their
    length, not by their number of documents. first_id: the token that the tokenizer begins a text with, if any; if a document
    begins with it, so do all its pieces."""
    return [
        [*(document[:1] if start and document[0] == first_id else ()), *document[start : start + length]]
        for document in documents
        for start in range(0, len(document), length)
    ]


def make_prompts(texts: Sequence[Sequence[int]], number: int, length: int) -> list[list[int]]:
    """The beginnings of `number` texts, evenly spread over all of them. Their lengths vary around `length`, so that the generated
    part begins at many positions. Raises ForedraftError if no text is long enough."""
    usable = [text for text in texts if len(text) > length]
    if not usable:
        raise ForedraftError(f"no document is longer than the {length} tokens that a generation begins with")
    chosen = [usable[i * len(usable) // number % len(usable)] for i in range(number)]
    lengths = [length // 2 + (i * 7) % length for i in range(number)]
    return [list(text[: max(1, size)]) for text, size in zip(chosen, lengths, strict=True)]


def generate(
    target: str, texts: Sequence[Sequence[int]], spec: GenerationSpec, out: Path, progress: Callable[[float], None]
) -> list[list[int]]:
    """-> the ids of each text, its prompt included. Texts that the file in `out` already holds are not written again."""
    prompts = make_prompts(texts, spec.number, spec.prompt_len)

    def begin() -> WriteTexts:
        llm = writing_llm(target)
        return lambda numbers: complete(
            llm, [prompts[number] for number in numbers], [_params(spec, number) for number in numbers]
        )

    return write_missing(out / FILE, spec.number, BATCH_SIZE, begin, progress)


def answer(
    target: str, sources: Sequence[list[int]], spec: GenerationSpec, out: Path, progress: Callable[[float], None]
) -> list[list[int]]:
    """-> the ids that an encoder-decoder writes for each source, after its start id. Otherwise like generate."""

    def begin() -> WriteTexts:
        llm = writing_llm(target)
        forced = list(llm.target.traits.start_ids[1:])

        def write(numbers: Sequence[int]) -> list[list[int]]:
            outputs = llm.generate([sources[n] for n in numbers], [_params(spec, n) for n in numbers])
            return [[*forced, *output.outputs[0].token_ids] for output in outputs]

        return write

    return write_missing(out / FILE, spec.number, BATCH_SIZE, begin, progress)


def writing_llm(target: str) -> LLM:
    """The target as it will serve, in its fastest format, without prefix caching: thousands of texts with no common prefix would fill
    half of the memory, and fragmentation as much again, because their regions are allocated and freed in all sizes."""
    return LLM(target, method="none", max_num_seqs=BATCH_SIZE, enable_prefix_caching=False)


def complete(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
    """-> the ids of each text, its prompt included"""
    outputs = llm.generate(list(prompts), list(params))
    return [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(prompts, outputs, strict=True)]


def seed_of(spec_seed: int, number: int) -> int:
    """The seed of one text. Each text has its own, so it is the same in any batch."""
    return spec_seed * 1_000_003 + number


def write_missing(
    file: Path, number: int, at_once: int, begin: Callable[[], WriteTexts], progress: Callable[[float], None]
) -> list[list[int]]:
    """The first `number` texts of a file. Missing ones are written and appended, at_once at a time. begin: called only if any is
    missing."""
    texts = read_texts(file)[:number]
    if len(texts) == number:
        return texts
    write = begin()
    while len(texts) < number:
        new = write(range(len(texts), min(len(texts) + at_once, number)))
        append_texts(file, new)
        texts += new
        progress(len(texts) / number)
    return texts


def _params(spec: GenerationSpec, number: int) -> SamplingParams:
    temperature = spec.temperatures[number % len(spec.temperatures)]
    return SamplingParams(temperature=temperature, max_tokens=spec.max_tokens, seed=seed_of(spec.seed, number))


def read_texts(file: Path) -> list[list[int]]:
    """The texts of a file's complete lines, each as ids; none if there is no file."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def append_texts(file: Path, texts: Sequence[Sequence[int]]) -> None:
    """Append complete lines, after removing an incomplete last line that a kill left."""
    with writing(file), file.open("a+b") as stream:
        stream.seek(0)
        stream.truncate(stream.read().rfind(b"\n") + 1)
        stream.write("".join(json.dumps(list(text)) + "\n" for text in texts).encode())
        stream.flush()
        os.fsync(stream.fileno())
