"""What a checkpoint's generation_config says about ids, whatever a request asks for."""

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
"""Settings that change a text and that nothing here does, with the value that changes nothing."""


class CheckpointRules(NamedTuple):
    """bad_words: sequences of ids whose last one is masked where it would complete them; an id that never comes is a sequence of
    one. not_first: ids that no text begins with. last_ids: one of them is the last that max_tokens allow; (): any is."""

    bad_words: tuple[tuple[int, ...], ...] = ()
    not_first: tuple[int, ...] = ()
    last_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> CheckpointRules:
        """config: what a generation_config sets. As transformers does, a bad word that is an end-of-sequence id alone is let."""
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
        """Without ids that a pruned checkpoint does not have."""
        words = tuple(word for word in self.bad_words if max(word) < vocab_size)
        first, last = (tuple(i for i in ids if i < vocab_size) for ids in (self.not_first, self.last_ids))
        return CheckpointRules(words, first, last)


NO_CHECKPOINT_RULES = CheckpointRules()


def not_honoured(config: Mapping[str, Any]) -> list[str]:
    """What a generation_config asks for and does not get, as name=value."""
    asked = ((name, config.get(name)) for name in _NOT_HONOURED)
    return [f"{name}={value}" for name, value in asked if value is not None and value != _NOT_HONOURED[name]]


def _ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
