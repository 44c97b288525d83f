"""Measures the memory of an object and of everything reachable from it."""

from __future__ import annotations

import gc
import sys
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

from torch import Tensor

_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType)


def held_bytes(root: object) -> int:
    """The bytes of all objects and tensors reachable from `root`, except modules, classes and functions."""
    seen: set[int] = set()
    total, waiting = 0, [root]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, _SHARED):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        if isinstance(one, Tensor):
            total += one.numel() * one.element_size()
        waiting += [one.__self__] if isinstance(one, MethodType) else gc.get_referents(one)
    return total
