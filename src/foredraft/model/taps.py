"""How the hidden states of a model are numbered.

A tap is an integer. For a model of L decoder layers:

* 0 .. L - 1: the input of that layer. 0 is the embeddings, i > 0 the output of layer i - 1.
* L: the output of the last layer, before the final norm.
* FINAL_NORM: the same after the final norm, which is what the lm_head reads.

Taps below L are the indices of transformers' `hidden_states`. Its last entry, `hidden_states[L]`, is FINAL_NORM here: that list does
not hold the raw output of the last layer. Checkpoints number layers in several other ways; the formats in `heads/` translate.
"""

from __future__ import annotations

FINAL_NORM = -1
"""The tap of the last hidden state, after the final norm."""


def is_tap(tap: int, num_layers: int) -> bool:
    """Whether a model with this many layers has this tap."""
    return tap == FINAL_NORM or 0 <= tap <= num_layers
