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

from lora_serve.model import triton_attention, triton_programs
from lora_serve.model.lora.kernels import triton as kernel

H100 = GPUTarget("cuda", 90, 32)
KINDS = {
    "*i64": ("table", "lengths", "row_tiles"),
    "*i32": ("slots", "tiles"),
    "*fp32": ("h", "scales", "partial", "sums"),
    "*bf16": ("x", "y", "query", "pool_k", "pool_v", "out"),
    "fp32": ("scale", "softcap"),
}
ALIGNED = ("x_stride", "y_stride", "in_features", "out_features", "width")
PAGES = {"G": 4, "D": 128, "KV_HEADS": 8, "BLOCK_SIZE": 16, "BLOCK_D": 128, "BLOCK_N": 64, "HALF": tl.bfloat16}
DECODE = {**PAGES, "CHUNK": 256, "BLOCK_G": 16, "HAS_SOFTCAP": True}
ROWS = {"BLOCK_R": kernel._ROW_RANKS, "ALIGNED": True}
TILES = {"HALF": tl.bfloat16, "BLOCK_M": 64, "BLOCK_R": kernel._TILE_RANKS, "ALIGNED": True}
SHRUNK_TILE = {**TILES, "BLOCK_K": kernel._TILE_INPUTS, "PART": kernel._TILE_PART}
PROGRAMS: list[tuple[Any, dict[str, Any], dict[str, int]]] = [  # constants, and options of the compiler
    (triton_programs.shrink_rows, {**ROWS, "BLOCK_K": kernel._ROW_INPUTS}, {"num_warps": kernel._SHRINK_WARPS}),
    (
        triton_programs.expand_rows,
        {**ROWS, "MAX_PARTS": 4, "BLOCK_N": kernel._ROW_OUTPUTS},
        {"num_warps": kernel._EXPAND_WARPS},
    ),
    (triton_programs.shrink_tiles, SHRUNK_TILE, {"num_stages": kernel._SHRINK_TILE_STAGES}),
    (
        triton_programs.expand_tiles,
        {**TILES, "BLOCK_N": kernel._TILE_OUTPUTS},
        {"num_warps": kernel._EXPAND_TILE_WARPS},
    ),
    (triton_attention.decode_chunks, DECODE, {"num_stages": 2}),
    (triton_attention.attend_tiles, {**PAGES, "HEADS": 4, "BLOCK_M": 64, "HAS_SOFTCAP": True}, {"num_stages": 2}),
    (triton_attention.fold_chunks, {"D": 128, "CHUNK": 256, "BLOCK_C": 16, "BLOCK_D": 128}, {}),
]


def loads_of(program: Any, constants: dict[str, Any], options: dict[str, int]) -> dict[str, int]:
    """How often each kind of load from global memory is in the program's PTX."""
    names = program.arg_names
    kinds = {name: kind for kind, members in KINDS.items() for name in members}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    unknown = {one.name for one in program.params if one.do_not_specialize or one.do_not_specialize_on_alignment}
    known = [name for name in names if name not in unknown]
    divisible = [name for name in known if name in ALIGNED or signature[name].startswith("*")]
    source = ASTSource(
        program,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    text = triton.compile(source, target=H100, options=options or None).asm["ptx"]
    found = re.findall(r"ld\.global\.[\w.]+|cp\.async\.c[ag]\.shared\.global", text)
    return {kind: found.count(kind) for kind in sorted(set(found))}


if __name__ == "__main__":
    print(json.dumps({one[0].__name__: loads_of(*one) for one in PROGRAMS}))
