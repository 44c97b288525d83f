"""What a head that adapts (LLM(adapt=True)) gains on a text whose domain changes half way, and what that costs.

    python -m benchmarks.drafters.adaptation HEAD --first FILE --second FILE [--target DIR] [--quantization int8] [--texts 4]
        [--half 900] [--gamma 4]

The first half of each text consists of documents of the first file, the second half of documents of the second file. The engine runs
as usual, except that its verifier follows the text: it accepts a draft token if it is the text's own, and then adds the text's own next
token. So two systems read the same texts: one with the head unchanged, the other with the same head adapting, starting afresh for each
text. They take turns step by step.
Acceptance: accepted / drafted tokens. Time: processor time of this thread over all steps, learning included; other programs do not
count. Files may be gzipped; a line that begins with "# ===== file: " or contains <|endoftext|> ends a document.
"""

from __future__ import annotations

import argparse
import gzip
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from foredraft import LLM, SamplingParams
from foredraft.engine.engine import Engine
from foredraft.engine.proposal import Proposal, Verdict
from foredraft.engine.sequence import TokenSequence
from foredraft.engine.step import Step
from foredraft.model import EMBEDDED

PROMPT_TOKENS = 16
SEPARATOR_LINE, SEPARATOR = "# ===== file: ", "<|endoftext|>"


@dataclass
class TextWins:
    """A verifier for one text: it accepts a draft token only if the text has the same token there."""

    text: Sequence[int]

    def __call__(
        self, logits: Tensor, proposal: Proposal, samplers: Any, histories: Sequence[Sequence[int]], **_: Any
    ) -> Verdict:
        counts, next_ids = [], []
        for draft, history in zip(proposal.draft_ids, histories, strict=True):
            rest = self.text[len(history) :]
            wrong = (i for i, token in enumerate(draft) if token != rest[i])
            counts.append(next(wrong, len(draft)))
            next_ids.append(rest[counts[-1]])
        return Verdict.of_chains(counts, next_ids)


@dataclass
class Half:
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    seconds: float = 0.0

    def add(self, step: Step, seconds: float) -> None:
        self.num_steps += 1
        self.seconds += seconds
        self.num_drafted += sum(outcome.num_drafted for outcome in step.outcomes)
        self.num_accepted += sum(outcome.num_accepted for outcome in step.outcomes)

    @property
    def acceptance(self) -> float:
        return self.num_accepted / max(self.num_drafted, 1)

    @property
    def tau(self) -> float:
        return 1 + self.num_accepted / self.num_steps

    @property
    def step_ms(self) -> float:
        return 1e3 * self.seconds / self.num_steps


@dataclass
class System:
    name: str
    llm: LLM
    halves: tuple[Half, Half] = field(default_factory=lambda: (Half(), Half()))
    num_refits: int = 0

    def begin(self, text: Sequence[int]) -> Run:
        fresh = self.llm.with_drafter()
        engine = fresh.trial(fresh.drafters, verifier=TextWins(text)).engine
        params = SamplingParams(temperature=0.0, max_tokens=len(text) - PROMPT_TOKENS, ignore_eos=True).resolve({})
        return Run(self, fresh, engine, engine.add(text[:PROMPT_TOKENS], params), len(text) // 2)


@dataclass
class Run:
    """One text being read by one system."""

    system: System
    llm: LLM
    engine: Engine
    sequence: TokenSequence
    middle: int

    def __post_init__(self) -> None:
        self.engine.observers.append(self)
        self.last: Step | None = None

    def observe(self, step: Step) -> None:
        self.last = step

    def step(self) -> None:
        """Run one step. Steps without a draft, such as those that read the prompt, are not counted."""
        half = self.system.halves[len(self.sequence.tokens) >= self.middle]
        started = time.thread_time()
        self.engine.step()
        seconds = time.thread_time() - started
        if self.last is not None and any(outcome.num_drafted for outcome in self.last.outcomes):
            half.add(self.last, seconds)
        if not self.engine.has_work:
            self.system.num_refits += sum(refits.num_refits for refits in self.llm.refits.values())


def documents_of(path: Path) -> Iterator[str]:
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    lines = (SEPARATOR if line.startswith(SEPARATOR_LINE) else line for line in text.splitlines(keepends=True))
    return (document.strip() for document in "".join(lines).split(SEPARATOR) if document.strip())


def halves_of(path: Path, llm: LLM, count: int, length: int) -> Iterator[list[int]]:
    """`count` lists of `length` tokens each, made of whole documents of which the last is cut to fit."""
    documents = documents_of(path)
    for _ in range(count):
        tokens: list[int] = []
        while len(tokens) < length:
            tokens += llm.text_tokenizer.encode(next(documents))
        yield tokens[:length]


def table(systems: Sequence[System]) -> str:
    head = "| head | half | acceptance | τ | step, ms | steps | refits |\n|---|---|---|---|---|---|---|"
    rows = [
        f"| {system.name} | {name} | {half.acceptance:.3f} | {half.tau:.2f} | {half.step_ms:.2f} | {half.num_steps} | {system.num_refits} |"
        for system in systems
        for name, half in zip(("first", "second"), system.halves, strict=True)
    ]
    fixed, adapting = systems
    ratios = [
        f"{name} half: acceptance {theirs.acceptance / max(ours.acceptance, 1e-9):.2f} x, step {theirs.step_ms / ours.step_ms:.3f} x"
        for name, ours, theirs in zip(("first", "second"), fixed.halves, adapting.halves, strict=True)
    ]
    return "\n".join([head, *rows, "", *ratios])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("--first", type=Path, required=True)
    parser.add_argument("--second", type=Path, required=True)
    parser.add_argument("--target", type=Path, default=EMBEDDED / "target")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--half", type=int, default=900, help="tokens in each half")
    parser.add_argument("--gamma", type=int, default=4)
    args = parser.parse_args()

    options: dict[str, Any] = {"num_threads": 1, "enable_prefix_caching": False}
    options |= {"dtype": args.dtype, "quantization": args.quantization}
    systems = [
        System(name, LLM(args.target, args.head, speculative_tokens=args.gamma, adapt=adapt, **options))
        for name, adapt in (("as it is", False), ("adapting", True))
    ]
    parts = [[*halves_of(path, systems[0].llm, args.texts, args.half)] for path in (args.first, args.second)]
    for first, second in zip(*parts, strict=True):
        runs = [system.begin([*first, *second]) for system in systems]
        while any(run.engine.has_work for run in runs):
            for run in runs:
                if run.engine.has_work:
                    run.step()
    print(f"{args.texts} texts of {2 * args.half} tokens, γ = {args.gamma}, one thread\n")
    print(table(systems))


if __name__ == "__main__":
    main()
