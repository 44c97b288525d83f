"""A simulated device for tests. It computes on the CPU, refuses operations that mix its tensors with CPU tensors, and counts how
often code waits for its results."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from foredraft.sampling import to_device

FAR = torch.device("meta")  # a device type of PyTorch that needs no driver

aten = torch.ops.aten
_ASKING = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class FarTensor(Tensor):
    """A tensor whose data is in `here`, but which PyTorch sees as a tensor on FAR."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> FarTensor:
        made: FarTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, here.shape, strides=here.stride(), storage_offset=here.storage_offset(), dtype=here.dtype, device=FAR
        )
        made.here = here
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} of a tensor that is elsewhere, out of its mode")


class Elsewhere(TorchDispatchMode):
    """While this mode is active, tensors that are created on FAR or computed from FarTensors are FarTensors. num_waits: operations
    that a real device would synchronise for: copies to the CPU, copies from pageable memory, and results that the CPU needs to know."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0
        self._making = _Making(self)

    def __enter__(self) -> Elsewhere:
        self._making.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._making.__exit__(*error)

    def send(self, numbers: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Replaces `to_device`, without counting a wait."""
        here = torch.as_tensor(numbers, dtype=dtype)
        return here if device.type == "cpu" or isinstance(here, FarTensor) else FarTensor(here.clone())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = _tensors([args, kwargs])
        own = [x for x in given if isinstance(x, FarTensor)]
        goal = kwargs.get("device")
        is_copy = func is aten._to_copy.default and goal is not None
        if own and not is_copy:
            _refuse_strangers(func, given)
        if own and (func in _ASKING or (is_copy and torch.device(goal) != FAR) or _asks_to_index(func, args)):
            self.num_waits += 1
        if is_copy and not own and torch.device(goal) == FAR:
            self.num_waits += 1
        becomes_far = torch.device(goal) == FAR if goal is not None else bool(own)
        if goal is not None:
            kwargs["device"] = torch.device("cpu")
        out = func(*tree_map(_here, args), **tree_map(_here, kwargs))
        if func._schema.is_mutable and (own or not becomes_far):
            return kwargs.get("out", args[0])
        if func is aten._local_scalar_dense.default or not becomes_far:
            return out
        return tree_map(lambda x: FarTensor(x) if isinstance(x, Tensor) else x, out)


class _Making(TorchFunctionMode):
    """Handles `torch.tensor`, which fills a tensor on FAR without going through the dispatch mode."""

    def __init__(self, elsewhere: Elsewhere) -> None:
        super().__init__()
        self._elsewhere = elsewhere

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu") == FAR:
            self._elsewhere.num_waits += 1
            return FarTensor(torch.tensor(*args, **{**kwargs, "device": "cpu"}))
        return func(*args, **kwargs)


def _asks_to_index(func: Any, args: Any) -> bool:
    """Whether an indexing operation waits: a mask must be counted first, and an index on the CPU must be copied to the device."""
    if func not in _INDEXING:
        return False
    indices = [index for index in args[1] if index is not None]
    return any(index.dtype == torch.bool or not isinstance(index, FarTensor) for index in indices)


def _refuse_strangers(func: Any, given: list[Tensor]) -> None:
    if any(not isinstance(x, FarTensor) and x.device == FAR for x in given):
        raise RuntimeError(
            f"{func}: a list of places; make them a tensor, which is sent (lists lose their numbers here)"
        )
    strangers = [x for x in given if not isinstance(x, FarTensor) and x.ndim > 0]
    if strangers and func not in _INDEXING and func is not aten.copy_.default:
        raise RuntimeError(f"{func}: tensors on two devices, {[tuple(x.shape) for x in given]}")


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map(lambda x: found.append(x) if isinstance(x, Tensor) else None, tree)
    return found


def _here(x: Any) -> Any:
    return x.here if isinstance(x, FarTensor) else x


def elsewhere(monkeypatch: Any) -> Elsewhere:
    """A new simulated device, to which every module's `to_device` copies without a wait."""
    monkeypatch.setattr(
        torch, "inference_mode", torch.no_grad
    )  # inference mode does not support such wrapper subclasses
    mode = Elsewhere()
    send: Callable[..., Tensor] = mode.send
    for name, module in list(sys.modules.items()):
        if name.startswith("foredraft") and getattr(module, "to_device", None) is to_device:
            monkeypatch.setattr(module, "to_device", send)
    return mode
