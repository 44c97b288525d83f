"""Compares plain decoding with speculation, and shows a progress bar while it runs."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foredraft.llm import LLM
    from foredraft.sampling import SamplingParams
    from foredraft.text.request import Prompt
    from foredraft.tools.demo import Comparison


def run_comparison(llm: LLM, prompt: Prompt, params: SamplingParams) -> Comparison:
    """Compare plain decoding with speculation, with the LLM's number of draft tokens."""
    from foredraft.cli.render.progress import count_bar
    from foredraft.tools.demo import NUM_RUNS, compare

    num_done = count(1)
    with count_bar("measuring", 2 * NUM_RUNS) as show:
        return compare(llm, prompt, params, llm.speculative_tokens, progress=lambda: show(next(num_done)))
