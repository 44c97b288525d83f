"""The kernels compile for common GPUs, which needs no GPU; the interpreter accepts programs that the compiler refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

COMPILE = """
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from foredraft.gpu import programs

element, capability = sys.argv[1], int(sys.argv[2])
NUMBERS = {"width": "i32", "epsilon": "fp32", "scale": "fp32", "window": "i32", "num_positions": "i32", "num_rows": "i32",
           "num_columns": "i32", "inner": "i32"}
TABLES = {"positions": "*i64", "row_spans": "*i64", "stores": "*i64", "capacities": "*i64", "cos": "*fp32", "sin": "*fp32",
          "reads": "*fp32", "sums": "*fp32", "slots": "*i64", "starts": "*i64", "path_slots": "*i64", "first_slots": "*i64"}
HEADS = {"GROUPS": 4, "KV_HEADS": 8, "WIDTH": 128, "BLOCK_D": 128}
CONSTANTS = [
    ("add_norm", {"HAS_DELTA": True, "BLOCK": 4096}),
    *(("rotate_and_store", {"HEADS": 32, "KV_HEADS": 8, "HALF": 64, "HAS_NORM": True, "BLOCK": 64, "HAS_SLOTS": bool(slots)}) for slots in (0, 1)),
    *(("attend", {**HEADS, "PARTS": parts, "BLOCK_G": 16, "BLOCK_N": 64, "HAS_SLOTS": bool(slots)}) for parts in (1, 8) for slots in (0, 1)),
    ("merge", {**HEADS, "PARTS": 8}),
    ("gated", {"BLOCK": 1024}),
    ("linear", {"HAS_BIAS": False, "BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128}),
]
found = {}
for name, constants in CONSTANTS:
    program = getattr(programs, name)
    names = list(program.arg_names)
    signature = {n: "constexpr" if n in constants else {**NUMBERS, **TABLES}.get(n, "*" + element) for n in names}
    places = {(names.index(n),): value for n, value in constants.items()}
    even = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n][0] == "*" or n in ("width", "inner")}
    source = ASTSource(fn=program, signature=signature, constexprs=places, attrs=even)
    assembly = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    found[name] = max(found.get(name, 0), len(re.findall(r"ld[.]global[a-zA-Z0-9_.:]*[.]b(?:8|16) ", assembly)))
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("element", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_and_load_many_numbers_at_a_time(element: str, capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, element, str(capability)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    narrow_loads = json.loads(ran.stdout)
    assert narrow_loads.pop("rotate_and_store") <= 4  # half a head each: one number per thread
    assert not any(narrow_loads.values()), narrow_loads
