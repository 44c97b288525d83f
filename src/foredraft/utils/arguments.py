"""Checks arguments: numbers, names and amounts. Nothing here imports PyTorch, so a mistake is reported at once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from foredraft.errors import ForedraftError, shown
from foredraft.sampling.params import AUTO, MOST_INT, VERIFICATIONS

DTYPES = ("float32", "bfloat16", "float16")
AUTOCAST_DTYPES = ("float32", "bfloat16")
AUTOCAST_CHOICES = (AUTO, *AUTOCAST_DTYPES)

DEVICE_MAPS = (AUTO, "balanced", "balanced_low_0", "sequential")
"""How transformers may spread a model over devices by itself."""

_NO_DEVICES = ("disk", "meta")

NO_TREES = "none"
QUANTIZATIONS = ("int8", "int4", "int4-all", "none")
"""int4 keeps a model's lm_head in eight bits, int4-all does not."""

HETEROGENEOUS_VOCAB = (AUTO, "slem", "tli", "none")
"""How a draft model with another vocabulary is used: by the method that suits the overlap, by a given one, or not at all."""

FOUR_BITS = ("int4", "int4-all")
_THREADS_PER_CORE = 4


def check_numbers(**settings: tuple[int | None, int]) -> None:
    """settings: name -> (value, minimum). Raises ForedraftError for a value that is not an integer, too small, or beyond 64 bits; None
    passes."""
    for name, (value, minimum) in settings.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < minimum):
            raise ForedraftError(f"{name} must be an integer of at least {minimum}, not {shown(value)}")
        if value is not None and value > MOST_INT:
            raise ForedraftError(f"{name} must be at most 2^63 - 1, not {shown(value)}")


def check_name(name: str, value: object, or_object: type | None = None) -> None:
    """Raises ForedraftError unless the value is a string, a path, None, or an object of the given class."""
    if value is not None and not isinstance(value, (str, os.PathLike, *(() if or_object is None else (or_object,)))):
        objects = "" if or_object is None else f", or a {or_object.__name__}"
        raise ForedraftError(f"{name} must be a name or a path{objects}, not {shown(value)}")


def check_threads(num_threads: int | None) -> None:
    """Raises ForedraftError for more than 4 threads per core: they would only wait for each other, and a thousand of them
    make a machine unusable."""
    check_numbers(num_threads=(num_threads, 1))
    cores = usable_cores()
    if num_threads is not None and num_threads > _THREADS_PER_CORE * cores:
        raise ForedraftError(
            f"num_threads {num_threads} is too many: this process may use {cores} cores, and at most "
            f"{_THREADS_PER_CORE} threads on each ({_THREADS_PER_CORE * cores}) are allowed"
        )


def usable_cores() -> int:
    """The number of cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def check_draft_len(speculative_tokens: int | str) -> None:
    """Raises ForedraftError unless it is "auto" or an integer of at least 0."""
    if speculative_tokens != AUTO:
        if isinstance(speculative_tokens, str):
            raise ForedraftError(f'speculative_tokens must be a number or "{AUTO}", not {speculative_tokens!r}')
        check_numbers(speculative_tokens=(speculative_tokens, 0))


def check_thresholds(min_acceptance_rate: float | None, max_draft_memory: int | None) -> None:
    """Raises ForedraftError for a rate outside 0 to 1, and for a negative number of bytes."""
    rate, memory = min_acceptance_rate, max_draft_memory
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1):
        raise ForedraftError(f"min_acceptance_rate must be a share between 0 and 1, not {rate!r}")
    if memory is not None and (isinstance(memory, bool) or not isinstance(memory, int) or memory < 0):
        raise ForedraftError(f"max_draft_memory must be a number of bytes, not {memory!r}")


def check_head_options(window: int | None, settings: Mapping[str, Any] | None) -> None:
    """Raises ForedraftError for a window below 0, and for settings that are not a mapping from names to values."""
    check_numbers(head_window=(window, 0))
    if settings is not None and not (isinstance(settings, Mapping) and all(isinstance(name, str) for name in settings)):
        raise ForedraftError(f"head_settings must be a mapping from names to values, not {shown(settings)}")


def check_heterogeneous_vocab(method: str | None) -> None:
    """Raises ForedraftError for an unknown method of using a draft model with another vocabulary; None passes."""
    if method is not None and method not in HETEROGENEOUS_VOCAB:
        raise ForedraftError(
            f"heterogeneous_vocab must be one of {', '.join(HETEROGENEOUS_VOCAB)}, not {shown(method)}"
        )


def check_token_tree(tree: object) -> Sequence[Sequence[int]] | str:
    """-> the same tree. Raises ForedraftError for anything but "auto", "none" or a list of lists of ranks."""
    if isinstance(tree, str) and tree in (AUTO, NO_TREES):
        return tree
    is_list = isinstance(tree, Sequence) and not isinstance(tree, str) and len(tree) > 0
    if not is_list or not all(_is_path(path) for path in tree):  # type: ignore[attr-defined]
        raise ForedraftError(
            f'speculative_token_tree must be "{AUTO}", "{NO_TREES}" or a list of lists of ranks, such as [[0], [1], [0, 0]], '
            f"not {shown(tree)}"
        )
    return tree  # type: ignore[return-value]


def _is_path(path: object) -> bool:
    return (
        isinstance(path, Sequence)
        and not isinstance(path, str)
        and len(path) > 0
        and all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in path)
    )


def check_precision(dtype: str, quantization: str | None, draft_quantization: str | None = None) -> None:
    """Raises ForedraftError for an unknown dtype or quantization."""
    if dtype != "auto" and dtype not in DTYPES:
        raise ForedraftError(f"dtype must be one of auto, {', '.join(DTYPES)}, not {dtype!r}")
    for name in (quantization, draft_quantization):
        if name is not None and name not in QUANTIZATIONS:
            raise ForedraftError(f"quantization must be one of {', '.join(QUANTIZATIONS)}, not {name!r}")


def rounds(quantization: str | None) -> TypeGuard[str]:
    """Whether a quantization rounds weights while they are loaded."""
    return quantization not in (None, "none")


def check_devices(device: str, device_map: object, tp_plan: object, quantization: str | None) -> None:
    """Raises ForedraftError for an invalid device map or tensor-parallel plan, and for options that exclude each other."""
    if tp_plan not in (None, AUTO):
        raise ForedraftError(f'tp_plan must be "{AUTO}", the model\'s own plan, not {shown(tp_plan)}')
    if device_map is not None:
        _check_device_map(device_map)
    given = [name for name, value in (("device_map", device_map), ("tp_plan", tp_plan)) if value is not None]
    if len(given) > 1 or (given and device != AUTO):
        other = "tp_plan" if len(given) > 1 else "device"
        raise ForedraftError(f"{given[0]} and {other} both say where the weights are placed: leave one of them out")
    if tp_plan is not None and rounds(quantization):
        raise ForedraftError("tp_plan splits floating-point weights: leave quantization out")


def _check_device_map(device_map: object) -> None:
    if isinstance(device_map, str) and device_map in DEVICE_MAPS:
        return
    if not isinstance(device_map, Mapping) or not all(isinstance(name, str) for name in device_map):
        raise ForedraftError(
            f"device_map must be one of {', '.join(DEVICE_MAPS)}, or a mapping from modules to devices, not {shown(device_map)}"
        )
    refuse_offloaded(device_map)


def refuse_offloaded(device_map: Mapping[str, object]) -> None:
    """Raises ForedraftError if a device map puts weights where every pass would have to fetch them from: on disk, or in CPU memory
    while others are on GPUs."""
    places = {name: str(device) for name, device in device_map.items()}
    has_gpus = any(place not in ("cpu", *_NO_DEVICES) for place in places.values())
    for name, place in places.items():
        if place in _NO_DEVICES or (place == "cpu" and has_gpus):
            raise ForedraftError(
                f"the device map leaves {name or 'the model'} on {place}, from which each pass would have to fetch it: use devices "
                "that hold all weights, a smaller dtype or a smaller model"
            )


def check_verification(name: str | None) -> str | None:
    """-> the same name. Raises ForedraftError for a rule that is not built in."""
    if name is not None and name not in VERIFICATIONS:
        raise ForedraftError(f"verification must be one of {', '.join(VERIFICATIONS)}, not {shown(name)}")
    return name


def check_autocast(dtype: str, known: Sequence[str] = AUTOCAST_DTYPES) -> None:
    """Raises ForedraftError for a precision that training does not support."""
    if dtype not in known:
        raise ForedraftError(f"--dtype must be one of {', '.join(known)}, not {dtype!r}")


def check_budget(seconds: float | None) -> None:
    """Raises ForedraftError unless it is a finite number of seconds above 0, or None."""
    if seconds is not None and not 0 < seconds < float("inf"):
        raise ForedraftError(f"budget must be more than 0 seconds, not {seconds:g}")
