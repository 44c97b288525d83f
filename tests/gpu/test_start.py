"""Kernels are tried on a device before anything is trusted to them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from foredraft.gpu import kernels, start, why_not


def test_where_they_run(device: torch.device) -> None:
    assert why_not(device, torch.float32) is None


def test_where_there_is_no_triton(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "find_spec", lambda _: None)
    assert why_not(device, torch.float32) == "Triton is not installed"


def test_where_a_kernel_fails(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no compiler\nand a long trace")

    monkeypatch.setattr(kernels, "gated", fail)
    assert why_not(device, torch.float32) == "RuntimeError: no compiler"
