"""The kernels compile for common GPUs, which needs no GPU; the interpreter accepts programs that the compiler refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

LEAST_SHARED_MEMORY = 99 << 10
"""Bytes that a program can have on every GPU with bfloat16."""

COMPILE = """
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from foredraft.gpu import kernels, programs

element, capability = sys.argv[1], int(sys.argv[2])
NUMBERS = {"width": "i32", "epsilon": "fp32", "scale": "fp32", "window": "i32", "num_positions": "i32", "num_rows": "i32",
           "num_columns": "i32", "inner": "i32", "stride": "i32", "num_parts": "i32", "num_spans": "i32", "num_stores": "i32"}
TABLES = {"ids": "*i64", "positions": "*i64", "row_spans": "*i64", "stores": "*i64", "capacities": "*i64", "cos": "*fp32", "sin": "*fp32",
          "reads": "*fp32", "sums": "*fp32", "slots": "*i64", "starts": "*i64", "path_slots": "*i64", "first_slots": "*i64", "chosen": "*i64"}
HEADS = {"GROUPS": 4, "KV_HEADS": 8, "WIDTH": 128, "BLOCK_D": 128}
LINEAR = {"HAS_BIAS": False, "IS_GATED": False, "ADDS": False}
CONSTANTS = [
    ("embed", {"BLOCK": 4096}, {}),
    ("norm", {"BLOCK": 4096}, {}),
    *(("rotate_and_store", {"HEADS": 32, "KV_HEADS": 8, "HALF": 64, "HAS_NORM": True, "BLOCK": 64, "HAS_SLOTS": bool(slots)}, {}) for slots in (0, 1)),
    *(("attend", {**HEADS, "PARTS": parts, "BLOCK_G": 16, "BLOCK_N": 64 if element != "fp32" else 32, "HAS_SLOTS": bool(slots)}, {"num_stages": 2}) for parts in (1, 8) for slots in (0, 1)),
    ("merge", {**HEADS, "PARTS": 8}, {}),
    ("gated", {"BLOCK": 1024}, {}),
    ("top_two", {"PARTS": 16, "BLOCK": 8192}, {}),
]
for tiles, options in (
    (kernels.FEW_ROWS, {}), (kernels.FEW_ROWS, {"ADDS": True}),
    (kernels.FEW_GATED_ROWS, {"IS_GATED": True}),
    (kernels.ANY_ROWS, {}), (kernels.ANY_ROWS, {"ADDS": True}), (kernels.ANY_GATED_ROWS, {"IS_GATED": True}),
):
    blocks = {"BLOCK_M": tiles.rows, "BLOCK_N": tiles.columns, "BLOCK_K": tiles.inner}
    itemsize = 4 if element == "fp32" else 2
    CONSTANTS.append(("linear", {**LINEAR, **options, **blocks}, {"num_warps": tiles.warps, "num_stages": tiles.stages * 2 // itemsize}))
narrow, shared = {}, {}
for name, constants, options in CONSTANTS:
    program = getattr(programs, name)
    names = list(program.arg_names)
    signature = {n: "constexpr" if n in constants else {**NUMBERS, **TABLES}.get(n, "*" + element) for n in names}
    if name == "top_two":
        signature |= {"out": "*fp64", "parts": "*fp64"}
    places = {(names.index(n),): value for n, value in constants.items()}
    even = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n][0] == "*" or n in ("width", "inner", "stride", "num_columns")}
    source = ASTSource(fn=program, signature=signature, constexprs=places, attrs=even)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    loads = len(re.findall(r"ld[.]global[a-zA-Z0-9_.:]*[.]b(?:8|16) ", compiled.asm["ptx"]))
    narrow[name] = max(narrow.get(name, 0), loads)
    shared[name] = max(shared.get(name, 0), compiled.metadata.shared)
print(json.dumps([narrow, shared]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("element", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_and_load_many_numbers_at_a_time(element: str, capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, element, str(capability)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    narrow_loads, shared_memory = json.loads(ran.stdout)
    assert max(shared_memory.values()) <= LEAST_SHARED_MEMORY, shared_memory
    assert narrow_loads.pop("rotate_and_store") <= 4  # half a head each: one number per thread
    assert not any(narrow_loads.values()), narrow_loads
