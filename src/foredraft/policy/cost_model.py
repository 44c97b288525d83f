"""The measured costs of steps and drafts on this machine. All times are in seconds."""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from foredraft.policy.curve import MAX_SAMPLES, MIN_SAMPLES, Curve, Point, undisturbed_time

STORED_DRAFT_FACTOR = 0.5
"""Stored draft times are multiplied by this factor. They may come from a time when the machine was busy. A cost that is too low is
corrected by the first drafts, while one that is too high is not, since then nothing is drafted."""
MIN_MISSED = 32
"""Fewer missed tokens are read in a pass that runs anyway, so they are assumed to take no time. What a draft after a few plain steps takes
besides is time to fetch the drafter into the CPU's caches, which does not grow with the number of tokens."""
_KINDS = {False: "greedy", True: "sampled"}
_FORMS = {False: "chain", True: "tree"}


class _DraftKind(NamedTuple):
    """A kind of draft; the times of each kind are kept apart."""

    drafter: str
    sampled: bool
    is_tree: bool


class _FirstRead(NamedTuple):
    """The first draft of a drafter, which read num_missed tokens too. curve: the times of such drafts."""

    seconds: float
    num_missed: int
    curve: Curve
    num_requests: int
    depth: int

    def seconds_per_token(self) -> float:
        """Of reading. Until drafts are measured, it is as if they took no time."""
        drafting = self.curve.at(self.num_requests, self.depth) or 0.0
        return max(self.seconds - drafting, 0.0) / self.num_missed


@dataclass(frozen=True, slots=True)
class StoredCosts:
    """The content of CostModel.as_dict, as read from a file."""

    steps: dict[bool, list[Point]]
    drafts: dict[_DraftKind, list[Point]]
    reading: dict[str, float]
    tree_factors: dict[bool, float]

    @classmethod
    def empty(cls) -> StoredCosts:
        return cls({sampled: [] for sampled in _KINDS}, {}, {}, {})

    def plain_time(self, num_sequences: int, *, sampled: bool) -> float | None:
        """The time of plain steps; of the other kind, which takes nearly as long, if this kind was never measured."""
        for kind in (sampled, not sampled):
            curve = _step_curve()
            curve.add_points(self.steps[kind])
            seconds = curve.at(num_sequences, num_sequences)
            if seconds:
                return seconds
        return None

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> StoredCosts:
        """Raises KeyError, TypeError or ValueError for anything that as_dict does not write."""
        kinds = {name: sampled for sampled, name in _KINDS.items()}
        forms = {name: is_tree for is_tree, name in _FORMS.items()}
        return cls(
            {sampled: [_point(*point) for point in fields["steps"][name]] for name, sampled in kinds.items()},
            {
                _DraftKind(str(name), kinds[kind], forms[form]): [_point(*point) for point in points]
                for name, kind, form, points in fields["drafts"]
            },
            {str(name): not_negative(value, "a time") for name, value in dict(fields["reading"]).items()},
            {kinds[kind]: not_negative(value, "a ratio") for kind, value in dict(fields["tree_factors"]).items()},
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "steps": {_KINDS[sampled]: points for sampled, points in self.steps.items()},
            "drafts": [
                [kind.drafter, _KINDS[kind.sampled], _FORMS[kind.is_tree], points]
                for kind, points in self.drafts.items()
            ],
            "reading": dict(self.reading),
            "tree_factors": {_KINDS[sampled]: factor for sampled, factor in self.tree_factors.items()},
        }


class CostModel:
    """The times of the target's steps (without the drafting) by sequences and rows, and of each drafter by requests and depth.

    sampled: greedy and sampled steps are kept apart, since computing probabilities and drawing take additional time.
    is_tree: chains and trees are kept apart too, since some drafters draft a chain in one call, while a tree takes a pass for each
    level. A step with a tree takes longer, by some factor, than one with as many rows without: attention and verification follow paths.
    stored: the costs of an earlier process. The machine may be more or less busy now, so they are used only after plain steps were
    measured again; then all of them are scaled by one factor.
    """

    def __init__(self, stored: StoredCosts | None = None) -> None:
        self._stored = stored
        self.steps = {sampled: _step_curve() for sampled in (False, True)}
        self.drafts: dict[_DraftKind, Curve] = {}
        self._tree_ratios = {sampled: deque[float](maxlen=MAX_SAMPLES) for sampled in (False, True)}
        self._tree_factors: dict[bool, float] = {}  # computed from the ratios on demand
        self._reading: dict[str, deque[float]] = {}
        self._first_reads: dict[str, _FirstRead] = {}
        self.num_samples = 0

    def as_dict(self) -> dict[str, Any]:
        """The measured seconds as JSON values; the stored costs as long as they are not replaced by newer ones."""
        return self.known().as_dict()

    def known(self) -> StoredCosts:
        """The measured costs; the stored ones as long as these are not in use."""
        if self._stored is not None:
            return self._stored
        return StoredCosts(
            {sampled: list(curve.points()) for sampled, curve in self.steps.items()},
            {kind: list(curve.points()) for kind, curve in self.drafts.items()},
            {name: median(samples) for name, samples in self._reading.items()},
            {sampled: undisturbed_time(ratios) for sampled, ratios in self._tree_ratios.items() if ratios},
        )

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> CostModel:
        """Raises KeyError, TypeError or ValueError for anything that as_dict does not write."""
        return cls(StoredCosts.from_dict(fields))

    def record_step(
        self, num_sequences: int, num_rows: int, seconds: float, *, sampled: bool, is_tree: bool = False
    ) -> None:
        """num_rows: of the target's pass, one for each sequence and one for each draft token. is_tree: whether any draft is a tree."""
        curve = self.steps[sampled]
        if is_tree:
            expected = curve.at(num_sequences, num_rows)
            self._tree_ratios[sampled].extend([] if not expected else [seconds / expected])
            self._tree_factors.pop(sampled, None)
            return
        curve.add(num_sequences, num_rows, seconds)
        self.num_samples += 1
        if num_rows == num_sequences and curve.num_samples(num_sequences, num_rows) >= MIN_SAMPLES:
            self._apply_stored(num_sequences, sampled)

    def record_prefill(self, num_rows: int, seconds: float) -> None:
        """Record a pass that read prompts. Before any draft is verified, it shows how much time a row adds: from nothing, on a
        memory-bound machine, to a quarter of a pass."""
        for curve in self.steps.values():
            curve.add_far(num_rows, seconds)

    def record_draft(
        self,
        drafter: str,
        num_requests: int,
        depth: int,
        num_missed: int,
        seconds: float,
        *,
        sampled: bool,
        is_tree: bool = False,
    ) -> None:
        """depth: the largest budget, or the levels of the deepest tree. num_missed: the tokens that the drafter had to read besides
        those of the last step. Drafts with fewer than MIN_MISSED, but some, are not counted."""
        curve = self._draft_curve(_DraftKind(drafter, sampled, is_tree))
        if not num_missed:
            curve.add(num_requests, depth, seconds)
            return
        if num_missed < MIN_MISSED:
            return
        expected = curve.at(num_requests, depth)
        if expected is None:
            first = _FirstRead(seconds, num_missed, curve, num_requests, depth)
            before = self._first_reads.get(drafter, first)
            self._first_reads[drafter] = min(first, before, key=lambda read: read.seconds / read.num_missed)
        else:
            samples = self._reading.setdefault(drafter, deque(maxlen=MAX_SAMPLES))
            samples.append(max(seconds - expected, 0.0) / num_missed)

    def step_time(self, num_sequences: int, num_rows: float, *, sampled: bool, is_tree: bool = False) -> float | None:
        """The undisturbed time of such a step; None if no step of this kind was measured."""
        seconds = self.steps[sampled].at(num_sequences, num_rows)
        return seconds if seconds is None or not is_tree else seconds * self._tree_factor(sampled)

    def _tree_factor(self, sampled: bool) -> float:
        if sampled not in self._tree_factors:
            ratios = self._tree_ratios[sampled]
            self._tree_factors[sampled] = max(1.0, undisturbed_time(ratios)) if ratios else 1.0
        return self._tree_factors[sampled]

    def plain_time(self, num_sequences: int, *, sampled: bool) -> float | None:
        """The mean time of plain steps, including disturbed ones, to compare single steps with; None if none was measured."""
        curve = self.steps[sampled]
        mean = curve.mean_at(num_sequences, num_sequences)
        return curve.at(num_sequences, num_sequences) if mean is None else mean

    def draft_time(self, drafter: str, num_requests: int, depth: int, *, sampled: bool, is_tree: bool = False) -> float:
        """The time of such drafts; 0 if nothing was measured, so that the drafter is tried. Until trees are measured, a tree is assumed
        to take as long as a chain of its depth."""
        kinds = [_DraftKind(drafter, sampled, is_tree), _DraftKind(drafter, sampled, is_tree=False)]
        times = (self._draft_curve(kind).at(num_requests, depth) for kind in kinds)
        return next((seconds for seconds in times if seconds is not None), 0.0)

    def reading_time(self, drafter: str, num_tokens: int) -> float:
        """The time that a drafter takes to read tokens it has missed, for instance a prompt."""
        samples, first = self._reading.get(drafter), self._first_reads.get(drafter)
        if samples:
            return median(samples) * num_tokens
        return 0.0 if first is None else first.seconds_per_token() * num_tokens

    def knows_plain_time(self, num_sequences: int, *, sampled: bool) -> bool:
        """Whether plain steps of about this many sequences were measured."""
        curve = self.steps[sampled]
        sizes = range(num_sequences * 2 // 3, num_sequences * 3 // 2 + 1)
        return any(curve.num_samples(n, n) >= MIN_SAMPLES for n in sizes)

    def _apply_stored(self, num_sequences: int, sampled: bool) -> None:
        """Scale the stored costs by the current time of plain steps and add them to the curves."""
        if self._stored is None:
            return
        before = self._stored.plain_time(num_sequences, sampled=sampled)
        now = self.steps[sampled].at(num_sequences, num_sequences)
        if before and now:
            self._add_stored(self._stored, now / before)
        self._stored = None

    def _add_stored(self, stored: StoredCosts, factor: float) -> None:
        for kind, points in stored.steps.items():
            self.steps[kind].add_points(points, factor)
        for draft_kind, points in stored.drafts.items():
            self._draft_curve(draft_kind).add_points(points, STORED_DRAFT_FACTOR * factor)
        for kind, tree_factor in stored.tree_factors.items():
            self._tree_ratios[kind].append(tree_factor)
            self._tree_factors.pop(kind, None)
        for name, seconds in stored.reading.items():
            samples = deque([STORED_DRAFT_FACTOR * factor * seconds], maxlen=MAX_SAMPLES)
            self._reading.setdefault(name, samples)

    def _draft_curve(self, kind: _DraftKind) -> Curve:
        if kind not in self.drafts:
            self.drafts[kind] = Curve(slope=0.25)
        return self.drafts[kind]


def _step_curve() -> Curve:
    return Curve(slope=0.05, statistic=undisturbed_time)


def _point(n: int, x: int, seconds: float) -> Point:
    if not (1 <= n <= sys.maxsize and 0 <= x <= sys.maxsize):
        raise ValueError(f"({n}, {x}) is not a point of a curve: n must be at least 1 and x at least 0")
    return int(n), int(x), not_negative(seconds, "a time")


def not_negative(value: float, name: str) -> float:
    """The value as a float. Raises ValueError for anything but a finite number of at least 0."""
    if not 0.0 <= value <= sys.float_info.max:
        raise ValueError(f"{name} must be finite and at least 0")
    return float(value)
