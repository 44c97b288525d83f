"""Measure how similar two vocabularies are on a text: two numbers that decide how a draft model with another vocabulary is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from foredraft.vocabulary.byte_vocabulary import ByteVocabulary

LEAST_AGREEMENT = 0.95
MOST_LENGTH_DIFFERENCE = 0.1

SAMPLE = """\
Question: Why does bread rise before it is baked?
Answer: Yeast eats some of the sugar in the dough and gives off carbon dioxide. The gas can't escape, so the dough grows.
Once upon a time there was a small boat that wanted to see the ocean. "I'm not afraid of the waves," it said.
The committee's report, published on 14 March 2019, found that 37.5% of all households had no access to broadband.

from collections import Counter

class Inventory:
    def __init__(self, items=None):
        self.items = Counter(items or {})

    def remove(self, name: str, count: int = 1) -> None:
        if self.items[name] < count:
            raise ValueError(f"only {self.items[name]} of {name!r} left")
        self.items[name] -= count

for (int i = 0; i < n; ++i) { total += values[i] * 2; }
SELECT name, COUNT(*) FROM orders WHERE price >= 10.00 GROUP BY name;
{"id": 7, "tags": ["new", "sale"], "url": "https://example.com/a?b=1"}

Der Zug nach München fährt heute zehn Minuten später ab, weil eine Brücke gesperrt ist.
El niño preguntó por qué las estrellas no se caen del cielo durante la noche.
"""
"""Prose, a dialogue, code and other languages."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """agreement: the share of the draft's ids on a text that span the same bytes as one target id. target_bytes_per_id,
    draft_bytes_per_id: on the same text."""

    agreement: float
    target_bytes_per_id: float
    draft_bytes_per_id: float

    @property
    def length_ratio(self) -> float:
        """How many draft ids correspond to one target id."""
        return self.target_bytes_per_id / self.draft_bytes_per_id

    @property
    def is_alike(self) -> bool:
        """Whether the draft's ids can be proposed as they are: nearly all of them agree in place, and they are about as long as the
        target's."""
        return self.agreement >= LEAST_AGREEMENT and abs(self.length_ratio - 1) <= MOST_LENGTH_DIFFERENCE

    def __str__(self) -> str:
        return (
            f"{100 * self.agreement:.0f} % of the draft's ids agree in place, {self.draft_bytes_per_id:.2f} bytes per id against "
            f"{self.target_bytes_per_id:.2f}"
        )


def overlap_of(target: ByteVocabulary, draft: ByteVocabulary, text: str = SAMPLE) -> Overlap:
    """Compare line by line. No ids agree in a part of a line that a vocabulary cannot write."""
    num_bytes = num_target = num_draft = num_agreeing = 0
    for line in text.splitlines(keepends=True):
        data = line.encode()
        target_ends, draft_ends = (vocabulary.spell(data)[1] for vocabulary in (target, draft))
        num_bytes += len(data)
        num_target += len(target_ends)
        num_draft += len(draft_ends)
        num_agreeing += len(_spans(target_ends) & _spans(draft_ends))
    return Overlap(num_agreeing / max(1, num_draft), num_bytes / max(1, num_target), num_bytes / max(1, num_draft))


def _spans(ends: Sequence[int]) -> set[tuple[int, int]]:
    """[start, end) of each id. Ids of a run whose parts are not known share one end, and have no span."""
    counts = Counter(ends)
    return {(start, end) for start, end in pairwise([0, *ends]) if counts[end] == 1}
