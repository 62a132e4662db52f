"""Compiles the Triton programs for a large GPU, which needs no GPU, and prints the load instructions of each as JSON.

A script, run with TRITON_INTERPRET=0 in a process of its own: the tests' process has them interpreted.
"""

from __future__ import annotations

import json
import re
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lora_serve.model.triton_programs import attention, lora

H100 = GPUTarget("cuda", 90, 32)
KINDS = {
    "*i64": ("table", "lengths"),
    "*i32": ("slots", "tiles"),
    "*fp32": ("h", "scales", "partial", "sums"),
    "*bf16": ("x", "y", "query", "pool_k", "pool_v", "out"),
    "fp32": ("scale", "softcap"),
}
ALIGNED = ("x_stride", "y_stride", "h_stride", "in_features", "out_features", "width")
DECODE = {"G": 4, "D": 128, "KV_HEADS": 8, "BLOCK_SIZE": 16, "CHUNK": 256, "BLOCK_G": 16, "BLOCK_D": 128, "BLOCK_N": 64}
TILES = {"HALF": tl.bfloat16, "BLOCK_M": 64, "BLOCK_R": 16, "ALIGNED": True}
PROGRAMS: list[tuple[Any, dict[str, Any]]] = [
    (lora.shrink_rows, {"BLOCK_R": 16, "BLOCK_K": 1024, "ALIGNED": True}),
    (lora.expand_rows, {"MAX_PARTS": 4, "BLOCK_R": 16, "BLOCK_N": 256, "ALIGNED": True}),
    (lora.shrink_tiles, {**TILES, "BLOCK_K": 64}),
    (lora.expand_tiles, {**TILES, "BLOCK_N": 128}),
    (attention.decode_chunks, {**DECODE, "HAS_SOFTCAP": True, "HALF": tl.bfloat16}),
    (attention.fold_chunks, {"D": 128, "CHUNK": 256, "BLOCK_D": 128}),
]


def loads_of(program: Any, constants: dict[str, Any]) -> dict[str, int]:
    """How often each kind of load from global memory is in the program's PTX."""
    names = program.arg_names
    kinds = {name: kind for kind, members in KINDS.items() for name in members}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    divisible = [name for name in names if name in ALIGNED or signature[name].startswith("*")]
    source = ASTSource(
        program,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    text = triton.compile(source, target=H100).asm["ptx"]
    found = re.findall(r"ld\.global\.[\w.]+|cp\.async\.c[ag]\.shared\.global", text)
    return {kind: found.count(kind) for kind in sorted(set(found))}


if __name__ == "__main__":
    print(json.dumps({program.__name__: loads_of(program, constants) for program, constants in PROGRAMS}))
