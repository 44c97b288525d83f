"""Converts a step and its rounds to the lines of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from foredraft.engine.sequence import Origin
from foredraft.engine.step import Outcome, Step
from foredraft.engine.token_tree import ROOT, tokens_to
from foredraft.text.detokenizer import IncrementalDecoder
from foredraft.trace.format import DraftToken, RoundLine, StepLine, TargetToken, Verdict
from foredraft.trace.probabilities import draft_probabilities, target_probabilities

_ORIGIN_NAMES = {Origin.PLAIN: "plain", Origin.RECOVERED: "recovered", Origin.BONUS: "bonus"}


class TokenDecoder:
    """Decodes the characters that each token adds to a text. tokenizer: None gives empty strings. before_ids: the preceding tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, before_ids: Sequence[int]) -> None:
        self._decoder = None
        if tokenizer is not None:
            self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=False, prompt_ids=before_ids)

    def preview(self, ids: Sequence[int]) -> list[str]:
        """The characters of draft tokens, as if all of them were accepted. The decoder does not change."""
        return [""] * len(ids) if self._decoder is None else _decode(self._decoder.clone(), ids)

    def push(self, ids: Sequence[int]) -> list[str]:
        """The characters of the next tokens of the text."""
        return [""] * len(ids) if self._decoder is None else _decode(self._decoder, ids)


def _decode(decoder: IncrementalDecoder, ids: Sequence[int]) -> list[str]:
    return [decoder.push(token) for token in ids]


def step_line(step: Step, number: int, start: float) -> StepLine:
    """number: of the step. start: seconds since the beginning of the recording."""
    return StepLine(
        step=number,
        start=_seconds(start),
        draft=_seconds(step.draft_time),
        verify=_seconds(step.read_time + step.verify_time),
        rest=_seconds(max(0.0, step.total_time - step.draft_time - step.read_time - step.verify_time)),
        read=_seconds(step.read_time),
        num_rows=step.num_rows,
        num_texts=len(step.scheduled),
        drafters={name: _seconds(seconds) for name, seconds in step.draft_times.items()},
    )


def round_line(step: Step, row: int, decoder: TokenDecoder, *, text: int, number: int) -> RoundLine:
    """What a step did to the sequence of scoring[row], with the probabilities of all its tokens.

    decoder: of the sequence's text before the step; it is advanced by the new tokens. text: the text's number. number: the step's.
    """
    item, outcome, num_kept = step.scoring[row], step.outcomes[row], step.num_kept[row]
    sequence, num_accepted = item.sequence, outcome.num_accepted
    num_before = len(sequence.tokens) - num_kept
    drafted = step.proposal.ids[row, : outcome.num_drafted].tolist()
    target_id = outcome.new_ids[-1] if num_kept > num_accepted else None
    target = target_probabilities(outcome, sequence.sampler, sequence.tokens[:num_before], target_id)
    draft_texts = _previews(decoder, drafted, outcome.parents)
    kept_texts = decoder.push(outcome.new_ids[:num_kept])
    draft = [
        DraftToken(
            id=drafted[i], text=draft_texts[i], p=target.p[i], p_raw=target.p_raw[i], q=q,
            verdict=_verdict(i, outcome, num_kept), parent=None if outcome.parents is None else outcome.parents[i],
        )
        for i, q in enumerate(draft_probabilities(step.proposal, row, drafted))
    ]  # fmt: skip
    own = None
    if target_id is not None:
        origin: Any = _ORIGIN_NAMES[sequence.origins[-1]]
        own = TargetToken(id=target_id, text=kept_texts[-1], p=target.p[-1], p_raw=target.p_raw[-1], origin=origin)
    return RoundLine(
        text=text,
        step=number,
        at=num_before - sequence.prompt_len,
        drafter=item.drafter if drafted else "",
        draft=draft,
        own=own,
    )


def _previews(decoder: TokenDecoder, drafted: Sequence[int], parents: Sequence[int] | None) -> list[str]:
    """The characters that each draft token adds after its predecessors."""
    if parents is None:
        return decoder.preview(drafted)
    return [decoder.preview(tokens_to(drafted, parents, node))[-1] for node in range(len(drafted))]


def _verdict(node: int, outcome: Outcome, num_kept: int) -> Verdict:
    """unused: not evaluated, because a token before it was rejected, a sibling was accepted, or the text had ended."""
    if node in outcome.path[:num_kept]:
        return "accepted"
    last = outcome.path[-1] if outcome.path else ROOT
    parent = node - 1 if outcome.parents is None else outcome.parents[node]
    return "rejected" if parent == last and outcome.num_accepted < num_kept else "unused"


def _seconds(value: float) -> float:
    """Rounded to a tenth of a microsecond."""
    return round(value, 7)
