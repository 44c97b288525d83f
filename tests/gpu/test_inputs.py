"""What a pass is told lies where the kernels look for it, and what a bucket has beyond the pass belongs to nobody."""

from __future__ import annotations

import torch

from foredraft.gpu import Bucket, Inputs, Noise, SpanPlace
from foredraft.gpu.inputs import BY_KEY, NO_SPAN
from foredraft.kernels import DrawSpec


def test_filling(device: torch.device) -> None:
    inputs = Inputs(Bucket(8, 4, 4), num_layers=2, device=device)
    spans = [SpanPlace(0, 3, 64, [1, 2, 3, 4]), SpanPlace(3, 2, 128, [5, 6, 7, 8])]
    for _ in range(2):  # what was there before leaves no trace
        inputs.fill([9] * 8, [9] * 8, [9] * 4, [SpanPlace(0, 8, 9, [9] * 4)] * 4)
        inputs.fill([10, 11, 12, 13, 14], [0, 1, 2, 7, 8], [2, 4], spans)
        assert inputs.ids.tolist() == [10, 11, 12, 13, 14, 0, 0, 0]
        assert inputs.positions.tolist() == [0, 1, 2, 7, 8, 0, 0, 0]
        assert inputs.row_spans.tolist() == [0, 0, 0, 1, 1, NO_SPAN, NO_SPAN, NO_SPAN]
        assert inputs.wanted.tolist() == [2, 4, 0, 0]
        assert inputs.capacities.tolist() == [64, 128, 0, 0]
        assert inputs.stores.tolist() == [[[1, 2], [5, 6], [0, 0], [0, 0]], [[3, 4], [7, 8], [0, 0], [0, 0]]]


def test_noise(device: torch.device) -> None:
    inputs = Inputs(Bucket(4, 4, 4, depth=2, noise=Noise.OWN), num_layers=1, device=device)
    for _ in range(2):  # what was there before leaves no trace
        inputs.fill_noise([DrawSpec(1.0, uniforms=[0.5, 0.5])] * 4)
        inputs.fill_noise([DrawSpec(), DrawSpec(0.8, uniforms=[0.25, 0.5]), DrawSpec(1.0, uniforms=[0.75])])
        assert inputs.temperatures.tolist() == [0.0, 0.8, 1.0, 0.0]
        assert inputs.uniforms.tolist() == [[0.0, 0.25, 0.75, 0.0], [0.0, 0.5, 0.0, 0.0]]
    assert inputs.keys is None


def test_shared_noise(device: torch.device) -> None:
    inputs = Inputs(Bucket(4, 4, 4, depth=2, noise=Noise.SHARED), num_layers=1, device=device)
    assert inputs.keys is not None
    for _ in range(2):
        inputs.fill_noise([DrawSpec(1.0, keys=[9, 9])] * 4)
        inputs.fill_noise([DrawSpec(), DrawSpec(0.8, keys=[-(2**62), 5]), DrawSpec(1.0, uniforms=[0.75])])
        assert inputs.keys.tolist() == [[0, -(2**62), 0, 0], [0, 5, 0, 0]]
        assert inputs.uniforms.tolist() == [[0.0, BY_KEY, 0.75, 0.0], [0.0, BY_KEY, 0.0, 0.0]]
