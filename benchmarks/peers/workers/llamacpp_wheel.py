"""llama.cpp's server inside this process, from the wheel of xllamacpp: the same code and settings as llama-server's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import xllamacpp

from benchmarks.peers.workers.protocol import Settings

_TYPES = xllamacpp.common_speculative_type
_servers: list[Any] = []
"""Keeps the servers alive until the process ends."""


def start(settings: Settings, files: tuple[Path, Path]) -> str:
    """-> the server's address. files: the target's and the draft model's. Raises ValueError for a mode that llama.cpp lacks."""
    server = xllamacpp.Server(_parameters(settings, files))
    _servers.append(server)
    return str(server.listening_address)


def facts() -> dict[str, str]:
    """Includes the instructions that the wheel was compiled for, which have to be those of the processor."""
    instructions = xllamacpp.get_system_info().strip(" |\n").replace(" | ", ", ")
    return {"llama.cpp": f"wheel of xllamacpp {xllamacpp.__version__}", "instructions": instructions}


def _parameters(settings: Settings, files: tuple[Path, Path]) -> Any:
    slots = max(settings.batch, 1)
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(files[0])
    parameters.n_parallel, parameters.n_ctx = slots, slots * settings.context
    parameters.cache_prompt, parameters.cache_ram_mib = False, 0
    parameters.fit_params = False
    parameters.offline, parameters.ui = True, False
    parameters.n_threads_http = slots + 1
    for threads in (parameters.cpuparams, parameters.cpuparams_batch):
        threads.n_threads, threads.poll = settings.threads, 0
    _speculate(parameters.speculative, settings, files[1])
    return parameters


def _speculate(speculative: Any, settings: Settings, draft: Path) -> None:
    if settings.mode == "draft_model":
        speculative.types = [_TYPES.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        speculative.draft.mparams.path, speculative.draft.n_max = str(draft), settings.gamma
        for threads in (speculative.draft.cpuparams, speculative.draft.cpuparams_batch):
            threads.n_threads, threads.poll = settings.threads, 0
    elif settings.mode == "ngram":
        speculative.types = [_TYPES.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        speculative.ngram_simple.size_n, speculative.ngram_simple.size_m = 3, settings.gamma
    elif settings.mode != "plain":
        raise ValueError(f"no mode {settings.mode}")
