"""Text split into pieces by the origin of its tokens."""

from __future__ import annotations

from foredraft import LLM, SamplingParams
from foredraft.cli.render.origins import OriginPieces, pieces_of
from tests.command_line import PROMPT


def test_pieces_join_to_the_text_and_match_the_tokens(llm: LLM) -> None:
    prompt, params = "x = 'ﬀ é 漢字 🙂'\ny = ", SamplingParams(max_tokens=40, seed=2, temperature=1.4)
    output = llm.generate(prompt, params)[0]
    text = output.outputs[0]
    assert llm.tokenizer is not None
    pieces = pieces_of(text, llm.tokenizer, output.prompt_token_ids)
    assert "".join(piece for piece, _ in pieces) == text.text
    assert {origin for _, origin in pieces} == set(text.origins)


def test_streamed_pieces_join_to_the_text_even_if_a_stop_string_holds_it_back(llm: LLM) -> None:
    whole = llm.generate(PROMPT, SamplingParams(max_tokens=40, temperature=0.0))[0].outputs[0].text
    params = SamplingParams(max_tokens=40, temperature=0.0, stop=(whole[30:36],))
    assert llm.tokenizer is not None
    pieces = OriginPieces(llm.tokenizer, llm.tokenizer(PROMPT)["input_ids"])
    shown = ""
    for delta in llm.stream(PROMPT, params):
        shown += "".join(piece for piece, _ in pieces.split(delta.text, delta.token_ids, delta.origins))
    assert shown == whole[: whole.index(whole[30:36])]
