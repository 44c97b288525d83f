"""How the other programs' models are made."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers.workers.setup import openvino_options, processor_instructions, wheel_is_enough


def sizes(hidden: int, intermediate: int) -> dict[str, int]:
    return {"hidden_size": hidden, "intermediate_size": intermediate}


def group(options: list[str]) -> str:
    return options[options.index("--group-size") + 1]


def test_groups_of_four_bits_divide_the_inputs() -> None:
    assert group(openvino_options("int4", sizes(2304, 6144))) == "128"
    assert group(openvino_options("int4", sizes(576, 1536))) == "64"


def test_other_precisions_have_no_groups() -> None:
    assert openvino_options("int8", sizes(576, 1536))[-1] == "int8"


def test_instructions_are_read_from_the_processors_flags(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: avx512f of a name\nflags\t\t: fpu avx2 fma\n\nflags\t\t: fpu avx2\n")
    assert processor_instructions(file) == {"fpu", "avx2", "fma"}
    assert processor_instructions(tmp_path / "none") == set()


@pytest.mark.parametrize(
    ("instructions", "is_enough"), [({"avx2", "fma"}, True), ({"avx2", "avx512f"}, False), ({"avx_vnni"}, False)]
)
def test_the_avx2_wheel_is_used_on_processors_without_more(instructions: set[str], is_enough: bool) -> None:
    assert wheel_is_enough(instructions) == is_enough
