"""Chooses the settings to run, by their predictions."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from foredraft.bench import Configuration
from foredraft.engine.methods import NO_DRAFT, name_of
from foredraft.engine.proposal import Drafter
from foredraft.sampling import AUTO
from foredraft.tune.measure import Measurement
from foredraft.tune.predict import Prediction

_NUM_FINALISTS = 3
_NEAR = 0.9
"""A drafter is near the best if its speedup is at least this share of it."""

Setting = tuple[str, int | str]
"""Drafter and number of draft tokens, independent of the batch size."""


def configurations_to_run(
    predictions: Sequence[Prediction], measurement: Measurement, joined: Sequence[str]
) -> list[Configuration]:
    """Plain decoding and the finalists' settings, each at every batch size."""
    sizes = measurement.batch_sizes
    settings = _settings_to_run(predictions, measurement, joined)
    return [
        *(Configuration.plain(size) for size in sizes),
        *(Configuration(method, gamma, size) for size in sizes for method, gamma in settings),
    ]


def _settings_to_run(
    predictions: Sequence[Prediction], measurement: Measurement, joined: Sequence[str]
) -> list[tuple[str | Drafter, int | str]]:
    """The few best fixed settings over all batch sizes, and "auto" with the drafters that came near them."""
    scores = _scores(predictions, len(measurement.batch_sizes))
    ranked = sorted(scores, key=lambda setting: -scores[setting])
    best_of_sizes = [
        setting_of(next(p.configuration for p in predictions if p.configuration.batch_size == size))
        for size in measurement.batch_sizes
    ]
    tops = [ranked[0], *best_of_sizes]
    near = [best for best in _best_of_drafters(ranked) if scores[best] >= scores[ranked[0]] + log(_NEAR)]
    chosen = list(dict.fromkeys([*tops, *near, *ranked]))[: max(_NUM_FINALISTS, len(set(tops)))]
    fixed: list[tuple[str | Drafter, int | str]] = [(measurement.methods[name], gamma) for name, gamma in chosen]
    return fixed + [(method, AUTO) for method in _autos(near, measurement, joined)]


def _scores(predictions: Sequence[Prediction], num_sizes: int) -> dict[Setting, float]:
    """The logarithm of each setting's predicted speedup, as a geometric mean over batch sizes."""
    scores: dict[Setting, float] = {}
    for prediction in predictions:
        setting = setting_of(prediction.configuration)
        scores[setting] = scores.get(setting, 0.0) + log(prediction.speedup.value) / num_sizes
    return scores


def _best_of_drafters(ranked: Sequence[Setting]) -> list[Setting]:
    """Each drafter's best setting, the best drafter first."""
    best: dict[str, Setting] = {}
    for setting in ranked:
        best.setdefault(setting[0], setting)
    return list(best.values())


def _autos(near: Sequence[Setting], measurement: Measurement, joined: Sequence[str]) -> list[str | Drafter]:
    """The best drafter alone, and those near it together. Drafters that are objects have no name to join, so they are left out."""
    names = [name for name, _ in near if isinstance(measurement.methods[name], str)]
    together = ["+".join(names)] if len(names) > 1 else []
    return list(dict.fromkeys([measurement.methods[near[0][0]], *(joined or together)]))


def setting_of(configuration: Configuration) -> Setting:
    assert configuration.speculative_tokens is not None
    return name_of(configuration.method or NO_DRAFT), configuration.speculative_tokens
