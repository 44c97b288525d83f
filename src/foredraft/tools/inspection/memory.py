"""Reports the memory that models take together, and the memory that is free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from foredraft.model import LoadOptions, available_memory
from foredraft.tools.inspection.report import HeadReport, MemoryReport, ModelReport

CACHE_SHARE = 0.5
"""The share of the memory free after loading the weights that an engine takes by default for the KV cache, at most."""


def memory_report(
    models: Sequence[ModelReport],
    options: LoadOptions,
    process_bytes: int | None,
    *,
    is_loaded: bool,
    head: HeadReport | None = None,
) -> MemoryReport:
    """models: the target first. process_bytes: resident memory before anything was loaded. is_loaded: whether the models, and the
    head, are loaded now."""
    device = options.torch_device()
    reports: list[ModelReport | HeadReport] = [*models] if head is None else [*models, head]
    free = available_memory(device)
    weights = _sum(report.costs.weight_bytes for report in reports)
    per_token = _sum(report.costs.cache_bytes_per_token for report in reports)
    full = None if per_token is None else per_token * models[0].context_len
    room = None if free is None or weights is None else CACHE_SHARE * (free - (0 if is_loaded else weights))
    return MemoryReport(
        device=str(device),
        when="free after loading" if is_loaded else "free",
        available_bytes=free,
        weight_bytes=weights,
        cache_bytes_per_token=per_token,
        full_context_bytes=full,
        num_full_contexts=None if room is None or not full else max(0, int(room // full)),
        process_bytes=process_bytes,
        peak_bytes=_sum([process_bytes, _peak(reports, models[0].context_len, device)]),
    )


def _peak(reports: Sequence[ModelReport | HeadReport], context_len: int, device: torch.device) -> int | None:
    """Peak bytes, those of the process itself excluded: the models are loaded one after the other, on the host; then one
    sequence grows to the target's context length."""
    weights = [report.costs.weight_bytes for report in reports]
    cache = [_largest_cache(report.costs.cache_bytes_per_token, context_len) for report in reports]
    peaks = [_sum([*weights, *cache])]
    if device.type == "cpu":
        peaks += [_sum([*weights[:i], report.load_bytes]) for i, report in enumerate(reports)]
    return None if None in peaks else max(peak for peak in peaks if peak is not None)


def _largest_cache(bytes_per_token: int | None, context_len: int) -> int | None:
    """A cache grows by doubling, and the old buffer stays until its contents have been copied."""
    if bytes_per_token is None:
        return None
    moving = 2 ** ((context_len - 1).bit_length() - 1) if context_len > 1 else 0
    return bytes_per_token * (context_len + moving)


def _sum(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)
