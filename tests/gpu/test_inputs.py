"""The inputs of a pass are where the kernels read them, and the rest of a bucket is padding."""

from __future__ import annotations

from array import array

import torch

from foredraft.gpu import Bucket, Inputs, Noise
from foredraft.gpu.inputs import BY_KEY, NO_SPAN, SlotPaths
from foredraft.kernels import CacheSpan, DrawSpec, StackBatch

FULL = StackBatch([9] * 8, [9] * 8, None, [9] * 4, [CacheSpan(0, 8, 9, 9, array("q", [9] * 4))] * 4)


def test_ids_and_positions_are_filled_in(device: torch.device) -> None:
    inputs = Inputs(Bucket(8, 4, 4), num_layers=2, device=device)
    spans = [CacheSpan(0, 3, 0, 64, array("q", [1, 2, 3, 4])), CacheSpan(3, 2, 7, 128, array("q", [5, 6, 7, 8]))]
    for _ in range(2):  # what was there before leaves no trace
        inputs.fill(FULL)
        inputs.fill(StackBatch([10, 11, 12, 13, 14], [0, 1, 2, 7, 8], None, [2, 4], spans))
        inputs.send()
        assert inputs.ids.tolist() == [10, 11, 12, 13, 14, 0, 0, 0]
        assert inputs.positions.tolist() == [0, 1, 2, 7, 8, 0, 0, 0]
        assert inputs.row_spans.tolist() == [0, 0, 0, 1, 1, NO_SPAN, NO_SPAN, NO_SPAN]
        assert inputs.wanted.tolist() == [2, 4, 0, 0]
        assert inputs.capacities.tolist() == [64, 128, 0, 0]
        assert inputs.stores.tolist() == [[[1, 2], [5, 6], [0, 0], [0, 0]], [[3, 4], [7, 8], [0, 0], [0, 0]]]


def test_slots_are_filled_in(device: torch.device) -> None:
    inputs = Inputs(Bucket(8, 4, 4, num_slots=8), num_layers=2, device=device)
    assert inputs.slots is not None
    assert inputs.starts is not None
    assert inputs.first_slots is not None
    assert inputs.path_slots is not None
    stores = array("q", [1, 2, 3, 4])
    spans = [CacheSpan(0, 3, 0, 64, stores), CacheSpan(3, 2, 7, 128, stores)]
    for _ in range(2):
        inputs.fill(FULL._replace(slots=[9] * 8), SlotPaths([9] * 8, [9] * 8))
        paths = SlotPaths([5, 3, 1, 20, 10], [0, 0, 0, 3, 3])
        inputs.fill(StackBatch([10, 11, 12, 13, 14], [0, 1, 2, 7, 8], [5, 3, 1, 20, 10], [2, 4], spans), paths)
        inputs.send()
        assert inputs.slots.tolist() == [5, 3, 1, 20, 10, 0, 0, 0]
        assert inputs.starts.tolist() == [0, 7, 0, 0]
        assert inputs.first_slots.tolist() == [0, 0, 0, 3, 3, 0, 0, 0]
        assert inputs.path_slots.tolist() == [5, 3, 1, 20, 10, 0, 0, 0]
    assert Inputs(Bucket(8, 4, 4), num_layers=2, device=device).slots is None


def test_uniform_numbers_are_filled_in(device: torch.device) -> None:
    inputs = Inputs(Bucket(4, 4, 4, depth=2, noise=Noise.OWN), num_layers=1, device=device)
    for _ in range(2):  # what was there before leaves no trace
        inputs.fill_noise([DrawSpec(1.0, uniforms=[0.5, 0.5])] * 4)
        inputs.fill_noise([DrawSpec(), DrawSpec(0.8, uniforms=[0.25, 0.5]), DrawSpec(1.0, uniforms=[0.75])])
        inputs.send()
        assert inputs.temperatures.tolist() == [0.0, 0.8, 1.0, 0.0]
        assert inputs.uniforms.tolist() == [[0.0, 0.25, 0.75, 0.0], [0.0, 0.5, 0.0, 0.0]]
    assert inputs.keys is None


def test_shared_noise_keys_are_filled_in(device: torch.device) -> None:
    inputs = Inputs(Bucket(4, 4, 4, depth=2, noise=Noise.SHARED), num_layers=1, device=device)
    assert inputs.keys is not None
    for _ in range(2):
        inputs.fill_noise([DrawSpec(1.0, keys=[9, 9])] * 4)
        inputs.fill_noise([DrawSpec(), DrawSpec(0.8, keys=[-(2**62), 5]), DrawSpec(1.0, uniforms=[0.75])])
        inputs.send()
        assert inputs.keys.tolist() == [[0, -(2**62), 0, 0], [0, 5, 0, 0]]
        assert inputs.uniforms.tolist() == [[0.0, BY_KEY, 0.75, 0.0], [0.0, BY_KEY, 0.0, 0.0]]
