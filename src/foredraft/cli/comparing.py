"""Plain decoding beside speculation, with a bar while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foredraft.demo import Comparison
    from foredraft.llm import LLM
    from foredraft.request import Prompt
    from foredraft.sampling import SamplingParams


def run_comparison(llm: LLM, prompt: Prompt, params: SamplingParams, gamma: int | str) -> Comparison:
    from foredraft.demo import NUM_RUNS, compare
    from foredraft.render import progress_bar

    with progress_bar("measuring", 2 * NUM_RUNS) as advance:
        return compare(llm, prompt, params, gamma, progress=advance)
