"""How one text is sampled, as plain data: enough to choose its tokens from logits, here, in another process or in another engine."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from foredraft.kernels import DrawSpec
from foredraft.sampling.noise import stream_keys
from foredraft.sampling.params import SamplingParams


class Noise(Enum):
    """The kind of noise that tokens are drawn with."""

    NONE = "none"
    """Greedy: the most likely token."""
    INDEPENDENT = "independent"
    """Fresh uniform numbers: target and drafter draw independently."""
    COUPLED = "coupled"
    """Gumbel noise, a function of (seed, child, position, token id): target and drafter draw with the same noise."""


class SamplingSpec(NamedTuple):
    """temperature: above 0, unless there is no noise. truncation: (top_k, top_p, min_p), or None if every id is kept.
    seed, child: for coupled noise. child: the index of this text among the n of its request."""

    temperature: float = 1.0
    truncation: tuple[int, float, float] | None = None
    seed: int = 0
    child: int = 0
    noise: Noise = Noise.INDEPENDENT

    @classmethod
    def of(cls, params: SamplingParams, child: int = 0) -> SamplingSpec:
        """params: resolved (no None among temperature, top_p, top_k, min_p)."""
        coupled = Noise.COUPLED if params.verifier == "coupled" else Noise.INDEPENDENT
        truncation = (params.top_k or 0, 1.0 if params.top_p is None else params.top_p, params.min_p or 0.0)
        return cls(
            temperature=1.0 if params.temperature is None else params.temperature,
            truncation=None if truncation == (0, 1.0, 0.0) else truncation,
            seed=params.seed or 0,
            child=child,
            noise=Noise.NONE if params.is_greedy else coupled,
        )

    @property
    def is_greedy(self) -> bool:
        return self.noise is Noise.NONE

    @property
    def is_coupled(self) -> bool:
        """Whether target and drafter draw with the same noise, so that a draft id is certain given the history."""
        return self.noise is Noise.COUPLED

    @property
    def draws(self) -> bool:
        """Whether a token is drawn with fresh noise."""
        return self.noise is Noise.INDEPENDENT

    def noise_keys(self, position: int, count: int) -> list[int]:
        """The noise keys of `count` tokens from this position in the output on."""
        return stream_keys(self.seed, self.child, position, count)

    def draw_spec(self, position: int, count: int = 1, uniforms: Sequence[float] = ()) -> DrawSpec:
        """How `count` tokens are chosen from this position in the output on (see `choose_with`). uniforms: `count` numbers in [0, 1), if
        tokens are drawn with fresh noise."""
        if self.is_greedy:
            return DrawSpec()
        if self.is_coupled:
            return DrawSpec(self.temperature, self.truncation, keys=self.noise_keys(position, count))
        return DrawSpec(self.temperature, self.truncation, uniforms)
