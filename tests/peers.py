"""Runs other engines, where `python -m benchmarks.peers.compare --setup ENGINE` has installed them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import foredraft
from benchmarks.peers.workers.setup import missing, python_of


def ask(environment: str, script: Path, given: Any) -> Any:
    """Run a script with the engine's own interpreter: JSON in, the JSON of its last line out. The script can import foredraft."""
    reason = missing(environment)
    if reason is not None:
        pytest.skip(f"{environment} is {reason}")
    variables = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(foredraft.__file__).parents[1]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [str(python_of(environment)), str(script)]
    result = subprocess.run(
        command, input=json.dumps(given), capture_output=True, text=True, env=variables, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])
