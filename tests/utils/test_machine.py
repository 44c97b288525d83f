"""What a measurement records about its machine."""

from __future__ import annotations

import json
from dataclasses import asdict

import torch

from foredraft.utils.machine import this_machine


def test_the_machine_is_named() -> None:
    machine = this_machine()
    assert machine.processor
    assert machine.num_threads == torch.get_num_threads()
    assert machine.torch == torch.__version__
    assert json.loads(json.dumps(asdict(machine))) == asdict(machine)
