"""How the other programs' models are made."""

from __future__ import annotations

from benchmarks.peers.workers.setup import openvino_options


def sizes(hidden: int, intermediate: int) -> dict[str, int]:
    return {"hidden_size": hidden, "intermediate_size": intermediate}


def group(options: list[str]) -> str:
    return options[options.index("--group-size") + 1]


def test_groups_of_four_bits_divide_the_inputs() -> None:
    assert group(openvino_options("int4", sizes(2304, 6144))) == "128"
    assert group(openvino_options("int4", sizes(576, 1536))) == "64"


def test_other_precisions_have_no_groups() -> None:
    assert openvino_options("int8", sizes(576, 1536))[-1] == "int8"
