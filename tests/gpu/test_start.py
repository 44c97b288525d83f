"""Kernels are tested on a device before they are used."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from foredraft.gpu import kernels, start, why_not


def test_kernels_that_work_are_used(device: torch.device) -> None:
    assert why_not(device, torch.float32) is None


def test_without_triton_kernels_are_not_used(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "find_spec", lambda _: None)
    assert why_not(device, torch.float32) == "Triton is not installed"


def test_failing_kernels_are_not_used(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no compiler\nand a long trace")

    monkeypatch.setattr(kernels, "gated", fail)
    assert why_not(device, torch.float32) == "RuntimeError: no compiler"
