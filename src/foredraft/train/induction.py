"""Induction heads for EAGLE-3: attention heads that find an earlier occurrence of the current token, and draft the token after it
(Olsson and others, 2022, arXiv:2209.11895).

A head of one layer can copy in this way, because each of its rows pairs the target's hidden states of one position with the token at the
next. The states of a row tell which token it follows, and the row's own token is what can be copied. Gradient descent finds this only
after far more text than small heads read. So the weights are computed here, from the target's hidden states on a sample of text, and
training starts from them.

Tokens are compared by codes: linear functions of their normalized embeddings, whitened, so that different tokens have nearly orthogonal
codes. Each row stores the codes of the two tokens before its own in directions of its state that vary least. Scores of attention are
products of codes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.errors import ForedraftError
from foredraft.heads import EagleHead
from foredraft.model import LanguageModel

_SLOW = 0.6
"""Rotary pairs that turn by less than this between two tokens as far apart as a sample's text is long (in units of π) hold codes."""
_STORED_STD = 0.5
"""The standard deviation of a stored code, relative to the size of states."""
_RIDGE = 1e-3
_SCORES_CURRENT, _SCORES_PREVIOUS, _SCORE_FIRST = (14.0, 12.0), (3.0, 9.0), 8.0
"""In nats, what a key's score gains if it follows the current token, and if the token before that is the same too: for the first and the
last attention head of the group. The third is the score of the first key, which attention falls back to if nothing matches."""
_BOOST = 4.0
"""By how much the logit of a token rises, relative to others, if its key has all of the attention."""


@dataclass(frozen=True, slots=True)
class _Codes:
    """Codes of tokens: (embedding - mean) @ projection, with a variance of 1 each. mean: [H]. projection: [H, K]."""

    mean: Tensor
    projection: Tensor

    def __call__(self, embeds: Tensor) -> Tensor:
        return (embeds - self.mean) @ self.projection


@dataclass(frozen=True, slots=True)
class _Readers:
    """Matrices that read a row's inputs of attention. embed: from the embedding of the row's token, its code, [H, K]. current, previous:
    from the state, the codes of the token before the row's and of the one before that, [H, K]. is_first: from the state, 1 in the first
    row of a text and 0 in others, [H, 1]. constant: from the embedding, 1, [H, 1]."""

    embed: Tensor
    current: Tensor
    previous: Tensor
    is_first: Tensor
    constant: Tensor


class _Sample:
    """A head's inputs on blocks of text, row by row. N texts of L tokens give R = N · L rows."""

    def __init__(self, head: EagleHead, target: LanguageModel, ids: Tensor) -> None:
        self.ids = ids
        self.features = torch.stack(target.read_features(ids.tolist(), head.config.taps)).float().flatten(0, 1)
        self._head, self._layer = head, _layer_of(head)

    @property
    def states(self) -> Tensor:
        """[R, H], fused"""
        return self._head.fuse(self.features)

    @property
    def normalized_states(self) -> Tensor:
        """[R, H], as attention reads them"""
        states: Tensor = self._layer.hidden_norm(self.states)
        return states

    @cached_property
    def embeds(self) -> Tensor:
        """[R, H], as attention reads them, of the tokens whose features the rows have"""
        return self.normalized_embeddings(self.ids.flatten())

    def normalized_embeddings(self, ids: Tensor) -> Tensor:
        """[n] -> [n, H]"""
        embeds: Tensor = self._layer.input_layernorm(self._head.embed(ids).float())
        return embeds

    @cached_property
    def is_first(self) -> Tensor:
        """[R, 1], 1 for the first row of each text"""
        first = torch.zeros(*self.ids.shape, 1)
        first[:, 0] = 1
        return first.flatten(0, 1)

    def before(self, rows: Tensor) -> Tensor:
        """For each row the row before, or itself if it is the first of its text. [R, K] -> [R, K]"""
        texts = rows.view(*self.ids.shape, -1)
        return torch.cat([texts[:, :1], texts[:, :-1]], dim=1).flatten(0, 1)


@torch.no_grad()
def with_induction_heads(
    head: EagleHead, target: LanguageModel, ids: Tensor, num_groups: int | None = None, seed: int = 0
) -> EagleHead:
    """The head with more groups of attention heads (a group shares keys and values), all of which are induction heads.

    head: EAGLE-3 of one Llama layer, in float32. ids: [N, L] int64, blocks of text like the text that it is to draft; 100 blocks of 512
    tokens are enough. num_groups: None: as few as possible, since Llama's configuration wants a width that is a multiple of the number
    of attention heads. seed: of the codes. Raises ForedraftError for a head of another form, or that cannot have as many groups.
    """
    _check(head)
    num_groups = num_groups or _least_groups(head)
    wider = _with_more_groups(head, num_groups)
    slow = _slow_places(wider, ids.shape[1])
    sample = _Sample(wider, target, ids)
    generator = torch.Generator().manual_seed(seed)
    size = (len(slow) - 1) // 2
    codes = _codes(sample, size, wider.config.hidden_size // 3, generator)
    readers = _readers(wider, sample, codes)
    attention, num_heads = _layer_of(wider).self_attn, _group_size(head) * num_groups
    for group in range(head.config.layer.num_key_value_heads, wider.config.layer.num_key_value_heads):
        order = slow[1:][torch.randperm(len(slow) - 1, generator=generator)]
        places = slow[:1], order[:size], order[size : 2 * size]
        queries, keys = _matching(readers, places, attention.head_dim, _group_size(head))
        values, outputs = _copying(wider, sample, generator)
        of_queries, of_keys = (slice(group * len(rows), (group + 1) * len(rows)) for rows in (queries, keys))
        attention.q_proj.weight[of_queries], attention.k_proj.weight[of_keys] = queries, keys
        attention.v_proj.weight[of_keys] = values
        attention.o_proj.weight[:, of_queries] = outputs.repeat(1, _group_size(head)) / num_heads
    return wider


def _check(head: EagleHead) -> None:
    config = head.config
    if config.kind != "eagle3" or config.family != "llama" or config.num_layers != 1 or config.mask_token is not None:
        raise ForedraftError("induction heads can be added to EAGLE-3 heads of one Llama layer only")
    if config.layer.attention_bias or config.fc_norm or config.norm_before_fc or not config.applies_fc:
        raise ForedraftError("induction heads need an fc that reads features as they are, and attention without biases")


def _layer_of(head: EagleHead) -> Any:
    return head.layers[0]


def _group_size(head: EagleHead) -> int:
    return int(head.config.layer.num_attention_heads // head.config.layer.num_key_value_heads)


def _least_groups(head: EagleHead) -> int:
    layer, group = head.config.layer, _group_size(head)
    numbers = range(1, layer.hidden_size // group + 1)
    return next((n for n in numbers if layer.hidden_size % (layer.num_attention_heads + n * group) == 0), 1)


def _with_more_groups(head: EagleHead, number: int) -> EagleHead:
    """A copy whose last groups of attention heads have weights of 0."""
    layer = copy.deepcopy(head.config.layer)
    layer.num_attention_heads += number * _group_size(head)
    layer.num_key_value_heads += number
    if head.config.hidden_size % layer.num_attention_heads:
        raise ForedraftError(
            f"a Llama layer of width {head.config.hidden_size} cannot have {layer.num_attention_heads} attention heads: its width must be "
            "a multiple of their number; add another number of groups"
        )
    wider = head.of_form(replace(head.config, layer=layer))
    weights = {name: weight.detach().clone() for name, weight in head.state_dict().items()}
    for name, empty in wider.state_dict().items():
        missing = [after - before for after, before in zip(empty.shape, weights[name].shape, strict=True)]
        if any(missing):
            weights[name] = functional.pad(weights[name], (0, missing[1], 0, missing[0]))
    wider.load_state_dict(weights, assign=True)
    for parameter, old in zip(wider.parameters(), head.parameters(), strict=True):
        parameter.requires_grad_(old.requires_grad)
    return wider


def _slow_places(head: EagleHead, length: int) -> Tensor:
    """Which elements of a key hardly turn over a text, the slowest first."""
    turns = head.rotary_emb.inv_freq.float() * length / torch.pi
    pairs = torch.arange(len(turns) - 1, -1, -1)
    pairs = pairs[turns[pairs] < _SLOW]
    if len(pairs) < 4:
        raise ForedraftError(f"positions turn too fast for texts of {length} tokens: give shorter blocks")
    return torch.stack([pairs, pairs + len(turns)], dim=1).flatten()


def _codes(sample: _Sample, size: int, num_directions: int, generator: torch.Generator) -> _Codes:
    """Random projections of the whitened principal directions of the embeddings of the sample's tokens. Each token counts as the root
    of its frequency."""
    counts = torch.bincount(sample.ids.flatten())
    ids = counts.nonzero()[:, 0]
    weights = counts[ids].sqrt() / counts.sqrt().sum()
    embeds = sample.normalized_embeddings(ids)
    mean = weights @ embeds
    centred = embeds - mean
    variances, directions = torch.linalg.eigh((centred * weights[:, None]).T @ centred)
    whitened = directions[:, -num_directions:] / variances[-num_directions:].sqrt()
    mixed = torch.linalg.qr(torch.randn(num_directions, size, generator=generator))[0]
    return _Codes(mean, whitened @ mixed)


def _readers(head: EagleHead, sample: _Sample, codes: _Codes) -> _Readers:
    """Store codes in the states, and find out how to read them."""
    quiet = _store(head, sample, codes)
    states, embeds = sample.normalized_states, sample.embeds
    reading = quiet / _layer_of(head).hidden_norm.weight[:, None]
    stored = _centred(states, reading / (states @ reading).std(0))
    current, previous = stored.chunk(2, dim=1)
    is_first = _fit(states, sample.is_first)
    return _Readers(
        embed=_centred(embeds, codes.projection / codes(embeds).std(0)),
        current=current,
        previous=previous,
        is_first=is_first / (states @ is_first)[sample.is_first[:, 0] == 1].mean(),
        constant=_fit(embeds, torch.ones(len(embeds), 1)),
    )


def _store(head: EagleHead, sample: _Sample, codes: _Codes) -> Tensor:
    """Let fc write the codes of the token of a row's features, and of the token before it, into the quietest directions of the fused
    state -> those directions, [H, 2 K]"""
    states = sample.states
    centred = states - states.mean(0)
    current = codes(sample.embeds)
    wanted = torch.cat([current, sample.before(current)], dim=1)
    quiet: Tensor = torch.linalg.eigh(centred.T @ centred)[1][:, : wanted.shape[1]]
    decoder = _fit(sample.features - sample.features.mean(0), wanted - wanted.mean(0))
    decoded = (sample.features @ decoder).std(0)
    std = _STORED_STD * _size(states)
    head.fc.weight += quiet @ (decoder / decoded * std - head.fc.weight.T @ quiet).T
    return quiet


def _matching(readers: _Readers, places: Sequence[Tensor], head_dim: int, num_heads: int) -> tuple[Tensor, Tensor]:
    """Queries and keys. places: the elements of a key that hold the score of the first key, the code of the token before the key's, and
    that of the token before that -> [num_heads * D, 2 H], [D, 2 H]"""
    first, current, previous = places
    width, size = readers.embed.shape
    keys = torch.zeros(head_dim, 2 * width)
    keys[current, width:], keys[previous, width:] = readers.current.T, readers.previous.T
    keys[first, width:] = readers.is_first.T
    queries = torch.zeros(num_heads, head_dim, 2 * width)
    scale = head_dim**0.5
    for query, of_current, of_previous in zip(
        queries, _spread(_SCORES_CURRENT, num_heads), _spread(_SCORES_PREVIOUS, num_heads), strict=True
    ):
        query[current, :width] = readers.embed.T * (of_current * scale / size)
        query[previous, width:] = readers.current.T * (of_previous * scale / size)
        query[first, :width] = readers.constant.T * (_SCORE_FIRST * scale)
    return queries.flatten(0, 1), keys


def _spread(ends: tuple[float, float], number: int) -> list[float]:
    spread: list[float] = torch.linspace(*ends, number).tolist()
    return spread


def _copying(head: EagleHead, sample: _Sample, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Values: codes of the row's token. Outputs: raise the logits of tokens in proportion to the likeness of their codes
    -> [D, 2 H], [H, D]"""
    config = head.config
    head_dim, width = config.layer.head_dim, config.hidden_size
    codes = _codes(sample, head_dim, max(head_dim, width // 2), generator)
    ids = torch.arange(config.vocab_size) if config.target_ids is None else config.target_ids
    counts = torch.bincount(sample.ids.flatten(), minlength=config.vocab_size)[ids]
    weights = ((counts + 1).sqrt() / (counts + 1).sqrt().sum())[:, None]
    of_ids = codes(sample.normalized_embeddings(ids))
    final_norm: Any = head.norm
    rows = head.logits(torch.eye(width)).T * final_norm.weight
    rows = rows - (weights * rows).sum(0)
    outputs = _fit(rows * weights.sqrt(), (of_ids - (weights * of_ids).sum(0)) * weights.sqrt())
    gain = ((rows @ outputs) * of_ids).sum(1).median()
    size = of_ids.square().mean().sqrt()
    values = torch.zeros(head_dim, 2 * width)
    values[:, :width] = codes.projection.T / size
    _, residual = _layer_of(head).inputs(sample.embeds, sample.states)
    return values, outputs * size * _BOOST * _size(residual) / gain


def _size(states: Tensor) -> Tensor:
    """The median over the rows of their root mean squares: the first rows of texts are much larger. [R, H] -> []"""
    return states.square().mean(1).median().sqrt()


def _centred(inputs: Tensor, reading: Tensor) -> Tensor:
    """inputs: [R, H]. reading: [H, K] -> the same, changed so that inputs @ reading has a mean of 0. There are no biases: nearly all
    inputs have a direction in common."""
    constant = _fit(inputs, torch.ones(len(inputs), 1))
    return reading - constant @ (inputs @ reading).mean(0, keepdim=True)


def _fit(inputs: Tensor, wanted: Tensor) -> Tensor:
    """Ridge regression on inputs that are scaled to a mean square of 1 each. inputs: [R, I], wanted: [R, O] -> [I, O]"""
    size = inputs.square().mean(0).sqrt().clamp(min=torch.finfo(inputs.dtype).tiny)
    scaled = inputs / size
    gram = scaled.T @ scaled + _RIDGE * len(inputs) * torch.eye(inputs.shape[1])
    solution: Tensor = torch.linalg.solve(gram, scaled.T @ wanted)
    return solution / size[:, None]
