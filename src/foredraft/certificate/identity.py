"""Is the text with drafts the text without them, token for token?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.certificate.forced import margin, tolerance
from foredraft.certificate.reading import read_whole, rows_of
from foredraft.certificate.trial import Text
from foredraft.model import LanguageModel
from foredraft.prefix import common_prefix
from foredraft.sampling import choose


@dataclass(frozen=True, slots=True)
class Identity:
    """Pairs of texts. num_tied: they part at a token that was a tie on this machine, and no more is said of them.
    num_different: they part elsewhere. first_difference: (text, output position) of the first of these."""

    num_texts: int
    num_tied: int
    num_different: int
    first_difference: tuple[int, int] | None


def compare_texts(model: LanguageModel, plain: Sequence[Text], drafted: Sequence[Text], noise: float) -> Identity:
    """noise: how far a logit may be off (reading.row_noise)."""
    num_tied, different = 0, list[tuple[int, int]]()
    for index, (a, b) in enumerate(zip(plain, drafted, strict=True)):
        if a.tokens == b.tokens:
            continue
        position = common_prefix(a.output_ids, b.output_ids)
        if noise > 0 and _is_tie(model, a, b, position, noise):
            num_tied += 1
        else:
            different.append((index, position))
    return Identity(len(plain), num_tied, len(different), different[0] if different else None)


def _is_tie(model: LanguageModel, a: Text, b: Text, position: int, noise: float) -> bool:
    if position >= min(len(a.output_ids), len(b.output_ids)):
        return False
    upto = a._replace(tokens=a.tokens[: a.prompt_len + position + 1])
    ((texts, logits),) = read_whole(model, [upto])
    row = rows_of(texts)[-1]
    best = int(choose(logits[-1:], [row]).ids[0])
    gaps = (margin(logits[-1], row, best, text.output_ids[position]) for text in (a, b))
    return all(gap <= tolerance(row, noise) for gap in gaps)
