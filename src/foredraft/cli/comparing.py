"""Plain decoding beside speculation, with a bar while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foredraft.llm import LLM
    from foredraft.sampling import SamplingParams
    from foredraft.text.request import Prompt
    from foredraft.tools.demo import Comparison


def run_comparison(llm: LLM, prompt: Prompt, params: SamplingParams, gamma: int | str) -> Comparison:
    from foredraft.cli.render import progress_bar
    from foredraft.tools.demo import NUM_RUNS, compare

    with progress_bar("measuring", 2 * NUM_RUNS) as advance:
        return compare(llm, prompt, params, gamma, progress=advance)
