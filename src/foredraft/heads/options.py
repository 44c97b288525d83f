"""User options for a head: its attention window, and settings that replace those read from its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foredraft.errors import ModelError, shown
from foredraft.heads.config import AnyHeadConfig, EagleConfig, HeadCheckpoint, TargetShape
from foredraft.model.taps import is_tap

_FLAGS = ("norm_before_residual", "norm_output")
_TABLES = ("offsets", "ids")
"""What the numbers of a vocabulary table may mean, in the order of the candidates for `target_ids`."""


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """window: the maximum number of tokens that a row of an EAGLE head or MTP layer sees; 0: all; None: the length of the head's
    training texts, if its files give it. settings: by name, see `overridden`."""

    window: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def are_given(self) -> bool:
        return self.window is not None or bool(self.settings)


def window_of(config: EagleConfig, requested: int | None, target_len: int | None) -> int | None:
    """How many tokens a row may see; None: all. requested: as in HeadOptions. target_len: the number of positions of the target.

    Files give the training length in `max_position_embeddings`. A value as large as the target's was copied from the target, and
    is ignored.
    """
    if requested is not None:
        return requested or None
    length = config.training_len
    return length if length is not None and target_len is not None and length < target_len else None


def overridden(checkpoint: HeadCheckpoint, settings: Mapping[str, Any], target: TargetShape) -> HeadCheckpoint:
    """The same weights with these settings, which are then no longer ambiguous.

    settings: taps, a list of hidden states of the target, numbered as in model/taps.py; for EAGLE-3 norm_before_residual and
    norm_output, true or false, applies_fc if the files leave it open, and d2t, "offsets" or "ids", if its numbers may be either;
    for DSpark drafts_from_anchor if the files leave it open. Raises ModelError for others.
    """
    config = checkpoint.config
    fields = {}
    for name, value in settings.items():
        known = _known(config)
        if name not in known:
            raise ModelError(f"head_settings: {shown(name)} cannot be set for this head; supported: {', '.join(known)}")
        field_name, checked = _checked(name, value, config, target)
        fields[field_name] = checked
    left = tuple(each for each in config.ambiguities if each.field not in fields)
    return checkpoint.with_settings(**fields, ambiguities=left)


def setting_of(field_name: str, candidates: tuple[Any, ...], index: int) -> tuple[str, Any]:
    """A candidate of an ambiguity as a setting: its name and its value."""
    if field_name == "target_ids":
        return "d2t", _TABLES[index]
    value = candidates[index]
    return field_name, list(value) if isinstance(value, tuple) else value


def _known(config: AnyHeadConfig) -> tuple[str, ...]:
    open_fields = {ambiguity.field for ambiguity in config.ambiguities}
    if not isinstance(config, EagleConfig) or config.kind != "eagle3":
        return ("taps", "drafts_from_anchor") if "drafts_from_anchor" in open_fields else ("taps",)
    applies_fc = ("applies_fc",) if "applies_fc" in open_fields else ()
    d2t = ("d2t",) if "target_ids" in open_fields else ()
    return ("taps", *_FLAGS, *applies_fc, *d2t)


def _checked(name: str, value: Any, config: AnyHeadConfig, target: TargetShape) -> tuple[str, Any]:
    """-> the field of the configuration, and its value"""
    if name == "taps":
        return name, _taps(value, len(config.taps), target)
    if name == "d2t":
        if value not in _TABLES:
            raise ModelError(f'head_settings: d2t must be "offsets" or "ids", not {shown(value)}')
        (readings,) = (each.candidates for each in config.ambiguities if each.field == "target_ids")
        return "target_ids", readings[_TABLES.index(value)]
    if not isinstance(value, bool):
        raise ModelError(f"head_settings: {name} must be true or false, not {shown(value)}")
    return name, value


def _taps(value: Any, count: int, target: TargetShape) -> tuple[int, ...]:
    is_list = isinstance(value, list | tuple) and all(type(each) is int for each in value)
    if not is_list or len(value) != count or not all(is_tap(tap, target.num_layers) for tap in value):
        raise ModelError(
            f"head_settings: taps must be a list of {count} hidden states of the target, 0 to {target.num_layers}, not {shown(value)}"
        )
    return tuple(value)
