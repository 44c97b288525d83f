"""The rules in a checkpoint's generation_config about token ids, which apply to every request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_NOT_HONOURED: Mapping[str, Any] = {
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "return_timestamps": False,
}
"""Settings that would change a text but are not supported, with their neutral values."""


class CheckpointRules(NamedTuple):
    """bad_words: sequences of ids whose last id is masked where it would complete them, also where they begin in the prompt, as in
    transformers; a sequence of one id suppresses that id everywhere. not_first: ids that are masked at the start of a text. last_ids: the ids allowed as the last token under max_tokens;
    (): any."""

    bad_words: tuple[tuple[int, ...], ...] = ()
    not_first: tuple[int, ...] = ()
    last_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> CheckpointRules:
        """config: the values of a generation_config. As in transformers, a bad word that is just an end-of-sequence id is ignored."""
        end_ids = _ids(config.get("eos_token_id"))
        words = [tuple(word) for word in config.get("bad_words_ids") or () if word]
        words = [word for word in words if not (len(word) == 1 and word[0] in end_ids)]
        suppressed = [(token,) for token in _ids(config.get("suppress_tokens"))]
        return cls(
            tuple(dict.fromkeys([*words, *suppressed])),
            _ids(config.get("begin_suppress_tokens")),
            _ids(config.get("forced_eos_token_id")),
        )

    def within(self, vocab_size: int) -> CheckpointRules:
        """The rules without ids that a pruned checkpoint does not have."""
        words = tuple(word for word in self.bad_words if max(word) < vocab_size)
        first, last = (tuple(i for i in ids if i < vocab_size) for ids in (self.not_first, self.last_ids))
        return CheckpointRules(words, first, last)


NO_CHECKPOINT_RULES = CheckpointRules()


def not_honoured(config: Mapping[str, Any]) -> list[str]:
    """The settings of a generation_config that are not honoured, as name=value."""
    asked = ((name, config.get(name)) for name in _NOT_HONOURED)
    return [f"{name}={value}" for name, value in asked if value is not None and value != _NOT_HONOURED[name]]


def _ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
