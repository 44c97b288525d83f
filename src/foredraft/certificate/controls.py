"""The catalogue of broken verifiers, caches and drafters: negative controls, which the checks must reject wherever they can show.

tests/verify/test_seeded_bugs.py goes through the same catalogue: each control breaks a property that `verify` guarantees.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from foredraft.certificate.broken_drafters import with_features_one_off
from foredraft.certificate.report import DRAWN, GREEDY, SAMPLED, SEEDED, CheckRun, ControlResult
from foredraft.engine.cache import KVCache
from foredraft.engine.memory_pool import MemoryPool
from foredraft.engine.proposal import Drafter
from foredraft.engine.region import Region
from foredraft.model import LanguageModel
from foredraft.sampling import SamplingParams
from foredraft.verify import Verifier, verify
from foredraft.verify import mutations as broken

TEXTS = (GREEDY, SEEDED, SAMPLED)
FIXED = (GREEDY, SEEDED)

_DEEP = 3
"""Draft tokens accepted before a "late" rejection."""
_FAR, _FAR_ENOUGH = 68, 96
"""Tokens of a text after which FarStaleCache goes stale, and the least length of a text that can show it."""
_MILD = 0.2
"""A penalty too small to change many texts."""
_MOSTLY = 0.9
"""If at least this share of the draft tokens was drawn from distributions, all of them count as drawn."""


# --- broken caches ------------------------------------------------------------------------------------------------


class _CountingCache(KVCache):
    """A cache that keeps a number for each sequence, initially 0."""

    @cached_property
    def _numbers(self) -> defaultdict[int, int]:
        return defaultdict(int)

    def drop(self, seq_ids: Sequence[int]) -> None:
        super().drop(seq_ids)
        for seq_id in seq_ids:
            self._numbers.pop(seq_id, None)


class StaleCache(_CountingCache):
    """Leaves the keys and values of the first rejected token in place, so what follows is read one position later. The
    number counts the stale tokens."""

    def num_held(self, seq_id: int) -> int:
        return super().num_held(seq_id) - self._numbers[seq_id]

    def keep_prefix_of(self, seq_id: int, wanted: Sequence[int], at_most: int | None = None) -> int:
        region, most = self.region(seq_id), len(wanted) if at_most is None else at_most
        has_room = len(region.tokens) < self.max_len // 2
        if region.tree is not None:
            self._keep_path(seq_id, wanted[:most], has_room=has_room)
        held = self.num_held(seq_id)
        self._numbers[seq_id] += held > most and has_room
        kept = min(held, most)
        del region.tokens[kept + self._numbers[seq_id] :]
        return len(wanted) - kept

    def _keep_path(self, seq_id: int, wanted: Sequence[int], *, has_room: bool) -> None:
        """Keep the tree's accepted path and one rejected token after it, unless a token before the tree was rejected."""
        region, held = self.region(seq_id), self.num_held(seq_id)
        assert region.tree is not None
        path = region.tree.path_of(wanted[held:])
        rejected = region.tree.child_of(path) if has_room and held <= len(wanted) else None
        stale = [] if rejected is None else [rejected]
        region.keep_prefix_of([*region.tokens, *wanted[held : held + len(path)], *stale])
        self._numbers[seq_id] += len(stale)

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        return super().reserve(seq_id, num_tokens + self._numbers[seq_id])


class FarStaleCache(_CountingCache):
    """After a whole draft was accepted with more than _FAR tokens held, the last token has the keys and values of the one before.
    The number is that of the tokens held before."""

    def keep_prefix_of(self, seq_id: int, wanted: Sequence[int], at_most: int | None = None) -> int:
        held, before = self.num_held(seq_id), self._numbers[seq_id]
        missing = super().keep_prefix_of(seq_id, wanted, at_most)
        kept = self._numbers[seq_id] = self.num_held(seq_id)
        if kept == held > _FAR and before and kept > before + 1:
            self._copy_last(self.region(seq_id))
        return missing

    @torch.inference_mode()
    def _copy_last(self, region: Region) -> None:
        for layer in region.layers:
            for rows in region.layer(layer):
                rows[:, -1] = rows[:, -2]


def _with_cache(cache_type: type[KVCache]) -> Callable[[LanguageModel], LanguageModel]:
    class Broken(LanguageModel):
        def new_cache(self, pool: MemoryPool, taps: Sequence[int] = (), *, keeps_encoded: bool = False) -> KVCache:
            return cache_type(
                pool,
                self.bytes_per_token(taps),
                self.traits.context_len,
                taps,
                self.bytes_per_source_token(keeps_encoded=keeps_encoded),
                keeps_encoded=keeps_encoded,
            )

    return lambda model: Broken(model.hf, model.traits, model.body)


# --- the catalogue ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Control:
    """One mistake. description: what is broken. kinds: the kinds of tokens in which it shows (report.py). verifier: the broken
    one. target: makes a broken target from the real one. drafter: makes a broken drafter from a real one.

    needs: what must happen for the mistake to make a difference. "": nothing; "drafts"; "sampled": drafts drawn from a
    distribution; "block": sampled drafts under block verification; "deep": long sampled drafts; "heads": sampled drafts of
    a drafter that reads hidden states; "far drafts": drafts in long texts; "penalties"; "rows in step": steps that use
    their noise in the same order.
    """

    name: str
    description: str
    kinds: tuple[str, ...]
    needs: str = ""
    verifier: Verifier = verify
    target: Callable[[LanguageModel], LanguageModel] | None = None
    drafter: Callable[[Drafter], Drafter] | None = None

    def result(self, kind: str, by: str | None, num_tokens: int, power: float | None = None) -> ControlResult:
        """See ControlResult."""
        return ControlResult(self.name, self.description, kind, by is not None, by, num_tokens, power)


CONTROLS: tuple[Control, ...] = (
    Control("accept all", "every draft token is accepted", TEXTS, "drafts", broken.accepts_everything),
    Control(
        "accept the likely", "a draft token is accepted where the target gives it a probability of at least a tenth",
        TEXTS, "drafts", broken.accepts_the_likely,
    ),
    Control("one too many", "one draft token too many is accepted", TEXTS, "drafts", broken.accepts_one_too_many),
    Control(
        "early bonus", "the bonus token comes from the row before its own", TEXTS, "drafts",
        broken.takes_the_bonus_one_row_early,
    ),
    Control("lost token", "the last accepted draft token is lost", TEXTS, "drafts", broken.loses_a_token),
    Control(
        "stale cache", "a rejected token stays in the cache", TEXTS, "drafts",
        target=_with_cache(StaleCache),
    ),
    Control(
        "stale far on", "beyond 68 tokens, the last token of a fully accepted draft is stale in the cache",
        FIXED, "far drafts", target=_with_cache(FarStaleCache),
    ),
    Control(
        "counts ahead", "penalties count draft tokens that are not there yet", FIXED, "penalties", broken.counts_ahead
    ),
    Control(
        "lenient", "draft tokens are accepted with probability min(1, 2 p/q)", (DRAWN,), "sampled",
        broken.with_rules(broken.LENIENT),
    ),
    Control(
        "no residual", "a recovered token is drawn from p", (SAMPLED, DRAWN), "sampled", broken.without_residual()
    ),
    Control(
        "late residual", "a recovered token is drawn from p, but only after three or more draft tokens", (DRAWN,), "deep",
        broken.without_residual(after=_DEEP),
    ),
    Control(
        "p and q exchanged", "a recovered token is drawn from max(q - p, 0)", (DRAWN,), "sampled",
        broken.exchanges_p_and_q,
    ),
    Control(
        "another q", "drafts are verified with a distribution that they were not drawn from", (DRAWN,), "sampled",
        broken.weighs_by_a_power(0.5),
    ),
    Control(
        "warmer q", "drafts are verified with their distribution at a temperature 2 % higher", (DRAWN,), "sampled",
        broken.weighs_by_a_power(1 / 1.02),
    ),
    Control(
        "noise again", "every second step reuses the noise of the step before", (SAMPLED,), "rows in step",
        broken.reuses_noise(),
    ),
    Control(
        "unlikely drafts dropped", "a drawn draft token is dropped unverified because its q is low", (DRAWN,), "sampled",
        broken.drops_unlikely_drafts,
    ),
    Control(
        "first failure", "block verification that stops at the first failure, without trying later positions", (DRAWN,), "block",
        broken.with_rules({"block": broken.stops_at_first_failure}),
    ),
    Control(
        "token residual", "block verification with the residual of single tokens", (DRAWN,), "block",
        broken.with_rules({"block": broken.token_residual}),
    ),
    Control(
        "uncapped scale", "block verification whose ratios are not capped at 1", (DRAWN,), "block",
        broken.with_rules({"block": broken.uncapped_scale}),
    ),
    Control(
        "drawn", "a token is drawn where the likeliest one was requested", (GREEDY,), "",
        broken.with_params(temperature=1.0),
    ),
    Control("other noise", "the noise of another seed", (SEEDED,), "", broken.with_params(seed=lambda s: s + 1)),
    Control(
        "likeliest", "the likeliest token in place of a drawn one", (SAMPLED,), "", broken.with_params(temperature=0.0)
    ),
    Control(
        "cooler", "a temperature a fifth lower than requested", (SAMPLED,), "",
        broken.with_params(temperature=lambda t: 0.8 * t),
    ),
    Control(
        "features one off", "a head reports q for tokens paired with the hidden states of the previous token",
        (SAMPLED,), "heads", drafter=with_features_one_off,
    ),
)  # fmt: skip


def controls_for(kind: str, run: CheckRun, params: SamplingParams) -> tuple[list[Control], list[str]]:
    """The controls of a kind. run: the check of the real verifier. params: those of its texts, with a number of draft tokens.

    -> (the controls that can show; for each reason why others cannot, a line with their names)
    """
    chosen, left_out = list[Control](), defaultdict[str, list[str]](list)
    for control in CONTROLS:
        if kind in control.kinds:
            reason = _missing(control.needs, run, params)
            if reason is None:
                chosen.append(control)
            else:
                left_out[reason].append(control.name)
    return chosen, [f"controls of {kind} tokens ({', '.join(names)}): {reason}" for reason, names in left_out.items()]


def _missing(needs: str, run: CheckRun, params: SamplingParams) -> str | None:
    """The reason why a control with these needs cannot show; None if it can."""
    length = params.speculative_tokens
    assert isinstance(length, int)
    if needs == "rows in step":
        has_certain = run.num_sampled < _MOSTLY * run.num_drafted
        return "steps with deterministic drafts do not use their noise in the same order" if has_certain else None
    if needs and not run.num_drafted:
        return "nothing was drafted"
    if needs in ("sampled", "block", "deep") and not run.num_sampled:
        return "no draft token was drawn from a distribution"
    if needs == "heads" and not run.num_by_heads:
        return "no draft token was drawn by a drafter that reads hidden states"
    if needs == "block" and params.verifier != "block":
        return f"drafts are verified by {params.verifier}"
    if needs == "block" and length < 2:
        return "a single draft token per step is not a block"
    if needs == "deep" and length <= _DEEP:
        return f"at most {length} draft tokens are accepted before one is rejected"
    if needs == "far drafts" and run.max_len < _FAR_ENOUGH:
        return f"the texts end before token {_FAR_ENOUGH}"
    if needs == "penalties" and abs(params.frequency_penalty + params.presence_penalty) < _MILD:
        return "there is no frequency or presence penalty to speak of"
    return None
