"""Texts of the target's own, to train on: what a draft will meet when it serves. Kept in a file, so that none is written
twice however often the run is cut off."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.sampling import SamplingParams
from foredraft.train.checkpoint import writing

FILE = "generations.jsonl"
_AT_A_TIME = 64


@dataclass(frozen=True, slots=True)
class Wanted:
    """number: of texts. prompt_len: tokens of a training text that each begins with. max_tokens: that the target adds.
    temperatures: in turn. seed: of the draws."""

    number: int
    temperatures: tuple[float, ...]
    prompt_len: int
    max_tokens: int
    seed: int = 0


def beginnings(documents: Sequence[Sequence[int]], every: int, first_id: int | None) -> list[list[int]]:
    """Where texts can begin: at each document, and at every `every` tokens of a longer one, so that kinds of text weigh by
    their length and not by their number of files. first_id: the token that begins a text where the tokenizer gives it one;
    pieces begin with it too."""
    return [
        [*(document[:1] if start and document[0] == first_id else ()), *document[start : start + every]]
        for document in documents
        for start in range(0, len(document), every)
    ]


def prompts_of(texts: Sequence[Sequence[int]], number: int, length: int) -> list[list[int]]:
    """The beginnings of texts, evenly spread over them; some longer and some shorter than `length`, so that what is written
    begins at all depths. Raises ForedraftError where no text is long enough."""
    usable = [text for text in texts if len(text) > length]
    if not usable:
        raise ForedraftError(f"no document is longer than the {length} tokens that a generation begins with")
    chosen = [usable[i * len(usable) // number % len(usable)] for i in range(number)]
    lengths = [length // 2 + (i * 7) % length for i in range(number)]
    return [list(text[: max(1, size)]) for text, size in zip(chosen, lengths, strict=True)]


def generate(
    target: str, texts: Sequence[Sequence[int]], wanted: Wanted, out: Path, progress: Callable[[float], None]
) -> list[list[int]]:
    """Prompt and text of each, as ids. What the file in `out` holds already is not written again."""
    prompts = prompts_of(texts, wanted.number, wanted.prompt_len)
    found = _known(out / FILE)[: wanted.number]
    if len(found) == wanted.number:
        return found
    llm = LLM(target, method="none", max_num_seqs=_AT_A_TIME)  # as it will serve, in its fastest format
    while len(found) < wanted.number:
        numbers = range(len(found), min(len(found) + _AT_A_TIME, wanted.number))
        params = [_params(wanted, number) for number in numbers]
        outputs = llm.generate([prompts[number] for number in numbers], params)
        new = [[*prompts[n], *output.outputs[0].token_ids] for n, output in zip(numbers, outputs, strict=True)]
        _append(out / FILE, new)
        found += new
        progress(len(found) / wanted.number)
    return found


def _params(wanted: Wanted, number: int) -> SamplingParams:
    """A seed for each text: it is then the same in any batch."""
    temperature = wanted.temperatures[number % len(wanted.temperatures)]
    seed = wanted.seed * 1_000_003 + number
    return SamplingParams(temperature=temperature, max_tokens=wanted.max_tokens, seed=seed)


def _known(file: Path) -> list[list[int]]:
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def _append(file: Path, texts: Sequence[Sequence[int]]) -> None:
    """Whole lines; what a kill left of one is cut off first."""
    with writing(file), file.open("a+b") as stream:
        stream.seek(0)
        stream.truncate(stream.read().rfind(b"\n") + 1)
        stream.write("".join(json.dumps(list(text)) + "\n" for text in texts).encode())
        stream.flush()
        os.fsync(stream.fileno())
