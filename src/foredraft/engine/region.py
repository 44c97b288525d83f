"""The keys and values of one sequence, the tokens they belong to, and the hidden states of the target that drafters read (features).

A region grows by doubling, so nothing is copied per step; rows after its tokens are garbage that the next read overwrites.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from copy import copy
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from foredraft.engine.sources import SourceKeys
from foredraft.engine.token_tree import ROOT
from foredraft.utils.prefix import common_prefix

KEY_MULTIPLE = 16
"""Attention reads keys in multiples of this, so that a row's bits do not depend on how many keys follow its own."""

_Layers = dict[int, tuple[Tensor, Tensor]]


class TokenTree(NamedTuple):
    """tokens: siblings differ. parents: for each token the index of its parent, an earlier token, or ROOT."""

    tokens: Sequence[int]
    parents: Sequence[int]

    def path_of(self, wanted: Sequence[int]) -> list[int]:
        """The nodes that match these tokens from the root on, up to the first that does not match."""
        nodes = {
            (parent, token): node for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True))
        }
        path: list[int] = []
        for token in wanted:
            node = nodes.get((path[-1] if path else ROOT, token))
            if node is None:
                break
            path.append(node)
        return path

    def child_of(self, path: Sequence[int]) -> int | None:
        """The first child token of the last of these nodes; None if it has none."""
        last = path[-1] if path else ROOT
        return next((token for token, parent in zip(self.tokens, self.parents, strict=True) if parent == last), None)


class Region:
    """The keys and values of one sequence, for every layer, and the tokens they belong to.

    features: [capacity, F], hidden states of the same tokens; None if no drafter taps them. source: the keys and values that cross
    attention reads; None without cross attention, and for a retained region.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.source: SourceKeys | None = None
        self.features: Tensor | None = None
        self.capacity = 0
        self.used_at = 0
        self._layers: _Layers = {}
        self._block: Tensor | None = None  # [layers, 2, H, capacity, D], if all layers are in one tensor
        self._addresses: array[int] | None = None
        self._compared_with: Sequence[int] | None = None
        self._num_compared = 0
        self._tree: TokenTree | None = None

    @property
    def layers(self) -> list[int]:
        """The layers that have attention, by their index in the model."""
        return list(self._layers)

    @property
    def tree(self) -> TokenTree | None:
        """The draft tree that was read after the tokens, until one of its paths is kept; None if there is none (a chain is part of
        the tokens)."""
        return self._tree

    @property
    def bytes_per_token(self) -> int:
        return sum(t.shape[0] * t.shape[2] * t.element_size() for pair in self._layers.values() for t in pair)

    def write(self, layer: int, key: Tensor, value: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Write the keys and values of the positions from `start` on and return those of all positions, padded to KEY_MULTIPLE.

        key: [H, R, Dk], value: [H, R, Dv] -> [H, N, Dk], [H, N, Dv] with N >= start + R, valid until the next write. Rows after
        start + R are finite and must be masked.
        """
        end = start + key.shape[1]
        keys, values = self._stored(layer, key, value)
        num_keys = padded(end)
        keys[:, start:end] = key
        values[:, start:end] = value
        return keys[:, :num_keys], values[:, :num_keys]

    def write_to(self, layer: int, key: Tensor, value: Tensor, slots: Sequence[int]) -> None:
        """Write keys [H, R, Dk] and values [H, R, Dv] to these slots."""
        keys, values = self._stored(layer, key, value)
        index = torch.tensor(slots, device=key.device)
        keys[:, index] = key
        values[:, index] = value

    def along(self, layer: int, start: int, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Copy the keys [H, N, Dk] and values [H, N, Dv] of the positions before `start` and then of these slots, padded with zeros
        to KEY_MULTIPLE."""
        return tuple(_along(held, start, slots) for held in self._layers[layer])  # type: ignore[return-value]

    def _stored(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self._layers:
            self._layers[layer] = (self._blank(key), self._blank(value))
        return self._layers[layer]

    def branch(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Record that a tree of tokens was read after those that are held, with token i (and its features) in slot
        len(self.tokens) + i. The next call of keep_prefix_of keeps one path of it. parents: for each token the index of its parent,
        or ROOT: the last token that is held."""
        self._tree = TokenTree(tokens, parents)

    @torch.inference_mode()
    def write_features(self, hidden: Tensor, start: int) -> None:
        """Write the features of the positions from `start` on. hidden: [R, F]"""
        if self.features is None:
            self.features = hidden.new_zeros(self.capacity, hidden.shape[1])
        self.features.narrow(0, start, hidden.shape[0]).copy_(hidden)

    def features_address(self, width: int) -> int:
        """The address of the features [capacity, width] bfloat16 of all slots, for kernels that write to them directly. Valid until the
        next resize. Raises ValueError for another width than before."""
        if self.features is None:
            self.features = torch.zeros(self.capacity, width, dtype=torch.bfloat16)
        if self.features.shape[1] != width:
            raise ValueError(f"features have {self.features.shape[1]} columns, not {width}")
        return self.features.data_ptr()

    def addresses(self, num_layers: int, like: Tensor) -> array[int]:
        """The addresses of the keys and the values [H, capacity, D] of the first num_layers layers, [num_layers * 2], for kernels that
        write to them directly. Valid until the next resize. like: [H, *, D], with their dtype and device."""
        if self._addresses is None or len(self._addresses) < 2 * num_layers:
            if not self._layers:
                self._take_block(like.new_zeros(num_layers, 2, like.shape[0], self.capacity, like.shape[2]))
            for layer in range(num_layers):
                if layer not in self._layers:
                    self._layers[layer] = (self._blank(like), self._blank(like))
            pairs = (self._layers[layer] for layer in range(num_layers))
            self._addresses = array("q", [tensor.data_ptr() for pair in pairs for tensor in pair])
        return self._addresses if len(self._addresses) == 2 * num_layers else self._addresses[: 2 * num_layers]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """The keys [H, len(tokens), Dk] and values [H, len(tokens), Dv] of one layer."""
        keys, values = self._layers[layer]
        return keys[:, : len(self.tokens)], values[:, : len(self.tokens)]

    def keep_prefix_of(self, wanted: Sequence[int], at_most: int | None = None) -> int:
        """Forget everything after the common prefix with `wanted`, and after at_most tokens. -> how many tokens of `wanted` have
        yet to be computed. Idempotent.

        `wanted` may have grown since the last call but must not have changed otherwise: tokens that were compared once are not
        compared again, so the cost is O(new tokens).
        """
        limit = len(wanted) if at_most is None else min(at_most, len(wanted))
        start = self._num_compared if self._compared_with is wanted else 0
        kept = common_prefix(self.tokens, wanted, start=min(start, limit, len(self.tokens)), limit=limit)
        if self._tree is not None:
            kept += self._keep_path(wanted[kept:limit] if kept == len(self.tokens) else ())
        del self.tokens[kept:]
        self._compared_with, self._num_compared = wanted, kept
        return len(wanted) - kept

    def _keep_path(self, wanted: Sequence[int]) -> int:
        """Append the path of the tree that these tokens follow, and forget the rest of the tree. -> the length of the path"""
        assert self._tree is not None
        path, self._tree = self._tree.path_of(wanted), None
        if path != list(range(len(path))):
            first = len(self.tokens)
            self.move_rows([first + node for node in path], first)
        self.tokens.extend(wanted[: len(path)])
        return len(path)

    @torch.inference_mode()  # passes run in it, and tensors they wrote may only be changed in it
    def move_rows(self, slots: Sequence[int], first: int) -> None:
        """Move the keys, values and features of these slots to the slots from `first` on."""
        index, end = torch.tensor(slots), first + len(slots)
        stores = [] if self.features is None else [self.features[None]]
        block = self._one_piece
        if block is not None:
            stores.append(block.flatten(0, 2))  # one operation instead of two for each layer
        else:
            stores += [tensor for pair in self._layers.values() for tensor in pair]
        for tensor in stores:
            tensor[:, first:end] = tensor[:, index.to(tensor.device)]

    def shared_view(self) -> Region:
        """A view of the same keys and values with its own list of tokens, valid until this region is resized. Rows that are written
        through it come after the tokens of this region, which do not change; the next read of this region overwrites them."""
        view = copy(self)
        view.tokens = list(self.tokens)
        return view

    def resize(self, capacity: int) -> None:
        """Make room for `capacity` tokens, and keep those that are held."""
        self._tree = None
        self.copy_rows(self, min(len(self.tokens), capacity), capacity)

    def copy_prefix(self, source: Region, length: int) -> None:
        """Copy the first `length` tokens of another region. Needs that much capacity."""
        self.copy_rows(source, length, self.capacity)
        self.tokens = source.tokens[:length]
        self._compared_with = None

    def copy_rows(self, source: Region, length: int, capacity: int) -> None:
        """Copy the keys, values and features of the first `length` tokens of a region, which may be this one, to new memory for
        `capacity` tokens."""
        self.capacity, self._addresses = capacity, None
        block = source._one_piece
        if block is not None:
            moved = _moved_rows(block.flatten(0, 2), length, capacity)
            self._take_block(moved.view(*block.shape[:3], *moved.shape[1:]))
        else:
            self._layers, self._block = _moved(source._layers, length, capacity), None
        self.features = _moved_features(source.features, length, capacity)

    @property
    def _one_piece(self) -> Tensor | None:
        """The block, if it holds all layers: a pass of another kind may have added some."""
        return self._block if self._block is not None and len(self._block) == len(self._layers) else None

    def _take_block(self, block: Tensor) -> None:
        self._block = block
        self._layers = {layer: (keys, values) for layer, (keys, values) in enumerate(block)}

    def _blank(self, like: Tensor) -> Tensor:
        return like.new_zeros(like.shape[0], self.capacity, like.shape[2])


class Regions(Protocol):
    """What a pass reads from and writes to: a cache, or views of regions of one."""

    @property
    def taps(self) -> tuple[int, ...]: ...

    def region(self, seq_id: int) -> Region: ...


def padded(num_keys: int) -> int:
    """The next multiple of KEY_MULTIPLE."""
    return -(-num_keys // KEY_MULTIPLE) * KEY_MULTIPLE


def _along(held: Tensor, start: int, slots: Sequence[int]) -> Tensor:
    """held: [H, capacity, D] -> [H, N, D]"""
    end = start + len(slots)
    ordered = held.new_zeros(held.shape[0], padded(end), held.shape[2])
    ordered[:, :start] = held[:, :start]
    ordered[:, start:end] = held[:, torch.tensor(slots, device=held.device)]
    return ordered


def _moved(layers: _Layers, held: int, capacity: int) -> _Layers:
    return {
        layer: (_moved_rows(keys, held, capacity), _moved_rows(values, held, capacity))
        for layer, (keys, values) in layers.items()
    }


def _moved_features(old: Tensor | None, held: int, capacity: int) -> Tensor | None:
    return None if old is None else _moved_rows(old[None], held, capacity)[0]


def _moved_rows(old: Tensor, held: int, capacity: int) -> Tensor:
    """Copy the first `held` rows to new memory for `capacity` rows; the others are 0, and every row is written only once."""
    new = old.new_empty(old.shape[0], capacity, old.shape[2])
    new[:, :held] = old[:, :held]
    new[:, held:] = 0
    return new
