"""The prompts of commands that measure, and the sampling that they measure with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from foredraft.cli.inputs import read_lines, read_text
from foredraft.cli.sampling import SamplingOptions

if TYPE_CHECKING:
    from foredraft.bench import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    workload: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="A .jsonl file with one object per line, with turns (as in Spec-Bench and MT-bench) or prompt, category and "
            "question_id; or any other file with one prompt per line. Default: built-in prompts.",
        ),
    ] = None
    num_prompts: Annotated[
        int | None,
        Option("--num-prompts", help="Use only this many, taken from the categories in turn. Default: all."),
    ] = None

    def read(self, *, of_sources: bool = False) -> Workload:
        """of_sources: whether the built-in prompts are those for an encoder-decoder. Raises ForedraftError for a file that cannot be
        read or holds no question."""
        workload = self._read_all(of_sources)
        return workload if self.num_prompts is None else workload.first(self.num_prompts)

    def _read_all(self, of_sources: bool) -> Workload:
        from foredraft.bench import Workload, built_in_workload

        file = self.workload
        if file is None:
            return built_in_workload(of_sources=of_sources)
        if file.suffix == ".jsonl":
            return Workload.parse(read_text(file), file.name)
        return Workload.of([line for _, line in read_lines(file)], file.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuringOptions(SamplingOptions):
    """Greedy by default."""

    temperature: Annotated[float | None, Option(help="0 is greedy.")] = 0.0
