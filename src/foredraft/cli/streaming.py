"""One text, shown as it is generated."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foredraft.llm import LLM
    from foredraft.sampling import SamplingParams
    from foredraft.text.outputs import Delta, RequestOutput
    from foredraft.text.request import Prompt


def stream_text(llm: LLM, prompt: Prompt, params: SamplingParams) -> RequestOutput:
    """Show one text while it is generated; return its output. Raises RequestError if it failed, after showing what there was."""
    from foredraft.cli.render.console import output_console
    from foredraft.cli.render.origins import OriginPieces, write_pieces

    console = output_console()
    pieces = output = None
    with closing_stream(llm, prompt, params) as deltas:
        for delta in deltas:
            if pieces is None and llm.tokenizer is not None:
                before = llm.target.inputs_for(llm.frontend.prepare(prompt, params).prompt_ids).tokens
                pieces = OriginPieces(llm.tokenizer, before)
            if pieces is not None:
                write_pieces(console, pieces.split(delta.text, delta.token_ids, delta.origins))
            output = delta.output
    assert output is not None, "a stream ends with its output"
    return output


def closing_stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> closing[Generator[Delta, None, None]]:
    """A stream whose request ends with the block, even if Ctrl-C ends it."""
    return closing(llm.stream(prompt, params))
