"""A step and its rounds in the terms of a trace, for whoever shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from foredraft.engine.sequence import Origin
from foredraft.engine.step import Step
from foredraft.text.text import IncrementalDecoder
from foredraft.trace.format import DraftToken, OwnToken, RoundLine, StepLine, Verdict
from foredraft.trace.probabilities import draft_said, target_says

_OWN = {Origin.PLAIN: "plain", Origin.RECOVERED: "recovered", Origin.BONUS: "bonus"}


class Characters:
    """What each token adds to a text. tokenizer: None leaves it out. before_ids: the tokens that stand before."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, before_ids: Sequence[int]) -> None:
        self._decoder = None
        if tokenizer is not None:
            self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=False, prompt_ids=before_ids)

    def of_draft(self, ids: Sequence[int]) -> list[str]:
        """What each would add, if all before it stood."""
        return [""] * len(ids) if self._decoder is None else _pieces(self._decoder.clone(), ids)

    def push(self, ids: Sequence[int]) -> list[str]:
        return [""] * len(ids) if self._decoder is None else _pieces(self._decoder, ids)


def _pieces(decoder: IncrementalDecoder, ids: Sequence[int]) -> list[str]:
    return [decoder.push(token) for token in ids]


def step_line(step: Step, number: int, start: float) -> StepLine:
    """start: seconds from the beginning of what is told."""
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


def round_line(step: Step, row: int, characters: Characters, *, text: int, number: int) -> RoundLine:
    """What the step of this number did to the text of scoring[row], with the probabilities of all its tokens. characters:
    of that text up to this round; they take its tokens up. text: the text's number."""
    item, outcome, num_kept = step.scoring[row], step.outcomes[row], step.num_kept[row]
    sequence, num_accepted = item.sequence, outcome.num_accepted
    before = len(sequence.tokens) - num_kept
    drafted = step.proposal.ids[row, : outcome.num_drafted].tolist()
    own_id = outcome.new_ids[-1] if num_kept > num_accepted else None
    said = target_says(outcome, sequence.sampler, sequence.tokens[:before], drafted, own_id)
    draft_texts = characters.of_draft(drafted)
    kept_texts = characters.push(outcome.new_ids[:num_kept])
    draft = [
        DraftToken(
            id=drafted[i], text=draft_texts[i], p=said.p[i], p_raw=said.p_raw[i], q=q,
            verdict=_verdict(i, num_accepted, num_kept),
        )
        for i, q in enumerate(draft_said(step.proposal, row, drafted))
    ]  # fmt: skip
    own = None
    if own_id is not None:
        origin: Any = _OWN[sequence.origins[-1]]
        own = OwnToken(id=own_id, text=kept_texts[-1], p=said.p[-1], p_raw=said.p_raw[-1], origin=origin)
    return RoundLine(
        text=text,
        step=number,
        at=before - sequence.prompt_len,
        drafter=item.drafter if drafted else "",
        draft=draft,
        own=own,
    )


def _verdict(i: int, num_accepted: int, num_kept: int) -> Verdict:
    """unused: nobody looked at it, because one before it was rejected or the text had ended."""
    if i < min(num_accepted, num_kept):
        return "accepted"
    return "rejected" if i == num_accepted < num_kept else "unused"


def _seconds(value: float) -> float:
    """To the tenth of a microsecond."""
    return round(value, 7)
