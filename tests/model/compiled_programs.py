"""Compiles the Triton programs for a large GPU, which needs no GPU, and prints the load instructions, registers and
bytes of stack and of shared memory of each as JSON.

A script, run with TRITON_INTERPRET=0 in a process of its own: the tests' process has them interpreted.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lora_serve.model import expert_products, triton_attention, triton_experts, triton_programs
from lora_serve.model.lora.kernels import triton as kernel

H100 = GPUTarget("cuda", 90, 32)
KINDS = {
    "*i64": ("table", "lengths", "row_tiles", "experts"),
    "*i32": ("slots", "tiles", "modules", "pieces", "order"),
    "*fp32": ("h", "scales", "partial", "sums", "sinks"),
    "*bf16": ("x", "y", "query", "pool_k", "pool_v", "out", "weight"),
    "fp32": ("scale", "softcap"),
}
ALIGNED = ("x_stride", "y_stride", "in_features", "out_features", "width", "expert_stride", "out_stride")
EXPERTS = {"TILE": expert_products.TILE, "BLOCK_N": expert_products._OUTPUTS, "in_stride": 1}
EXPERT_TYPES = {
    name: {**EXPERTS, "WIDE": wide, "BLOCK_K": expert_products._INPUT_BYTES // dtype.itemsize}
    for name, wide, dtype in (("", tl.bfloat16, torch.bfloat16), (" of float32", tl.float32, torch.float32))
}
PAGES = {"G": 4, "D": 128, "KV_HEADS": 8, "BLOCK_SIZE": 16, "BLOCK_D": 128, "BLOCK_N": 64, "HALF": tl.bfloat16}
PAGES |= {"STORED": 0, "WIDTH": 128}
DECODE = {**PAGES, "CHUNK": 256, "BLOCK_G": 16, "HAS_SOFTCAP": True}
TILES_OF_ROWS = {**PAGES, "HEADS": 4, "BLOCK_M": 64, "HAS_SOFTCAP": True, "HAS_SINKS": True}
CODES = {"int8": {"STORED": 1, "WIDTH": 132}, "fp8": {"STORED": 2, "WIDTH": 132}}
ROWS = {"BLOCK_R": kernel._ROW_RANKS, "ALIGNED": True}
SHRUNK_ROW, EXPANDED_ROW = (
    ROWS | {"BLOCK_K": kernel._ROW_INPUTS},
    ROWS | {"MAX_PARTS": 4, "BLOCK_N": kernel._ROW_OUTPUTS},
)
SHRINK_ROWS, EXPAND_ROWS = {"num_warps": kernel._SHRINK_WARPS}, {"num_warps": kernel._EXPAND_WARPS}
TILES = {"BLOCK_M": 64, "BLOCK_R": kernel._TILE_RANKS, "ALIGNED": True}
SHRUNK_TILE = {**TILES, "BLOCK_K": kernel._TILE_INPUTS, "PART": kernel._TILE_PART}
EXPANDED_TILE = {**TILES, "BLOCK_N": kernel._TILE_OUTPUTS}
TYPES = {  # of weights, and of products with a bfloat16 model's inputs; of a float16 model's
    "": {"DTYPE": tl.bfloat16, "WIDE": tl.bfloat16},
    " float32": {"DTYPE": tl.float32, "WIDE": tl.float32},
    " float16": {"DTYPE": tl.bfloat16, "WIDE": tl.float32},
}
SHRINK_TILES, EXPAND_TILES = {"num_stages": kernel._SHRINK_TILE_STAGES}, {"num_warps": kernel._EXPAND_TILE_WARPS}
PROGRAMS: dict[str, tuple[Any, dict[str, Any], dict[str, int]]] = {  # constants, and options of the compiler
    "shrink_rows": (triton_programs.shrink_rows, SHRUNK_ROW | {"experts": None, "per_row": 1}, SHRINK_ROWS),
    "shrink_rows of experts": (triton_programs.shrink_rows, SHRUNK_ROW, SHRINK_ROWS),
    "expand_rows": (triton_programs.expand_rows, EXPANDED_ROW | {"experts": None}, EXPAND_ROWS),
    "expand_rows of experts": (triton_programs.expand_rows, EXPANDED_ROW, EXPAND_ROWS),
    **{f"shrink_tiles{n}": (triton_programs.shrink_tiles, SHRUNK_TILE | t, SHRINK_TILES) for n, t in TYPES.items()},
    **{f"expand_tiles{n}": (triton_programs.expand_tiles, EXPANDED_TILE | t, EXPAND_TILES) for n, t in TYPES.items()},
    "sort_pairs": (triton_experts.sort_pairs, {"TILE": expert_products.TILE, "BLOCK": expert_products._SORTED}, {}),
    **{
        f"multiply_tiles{name}": (triton_experts.multiply_tiles, sizes, {"num_stages": expert_products._STAGES})
        for name, sizes in EXPERT_TYPES.items()
    },
    "decode_chunks": (triton_attention.decode_chunks, DECODE, {"num_stages": 2}),
    "attend_tiles": (triton_attention.attend_tiles, TILES_OF_ROWS, {"num_stages": 2}),
    **{f"decode_chunks {n}": (triton_attention.decode_chunks, DECODE | c, {"num_stages": 2}) for n, c in CODES.items()},
    **{
        f"attend_tiles {name}": (triton_attention.attend_tiles, TILES_OF_ROWS | codes, {"num_stages": 2})
        for name, codes in CODES.items()
    },
    "fold_chunks": (
        triton_attention.fold_chunks,
        {"D": 128, "CHUNK": 256, "BLOCK_C": 16, "BLOCK_D": 128, "HAS_SINKS": True},
        {},
    ),
}


def facts_of(program: Any, constants: dict[str, Any], options: dict[str, int], model: str) -> dict[str, int]:
    """How often each kind of load from global memory is in the program's PTX; what one thread takes.

    `model`: the type of a model's own tensors.
    """
    names = program.arg_names
    kinds = {name: kind.replace("bf16", model) for kind, members in KINDS.items() for name in members}
    if constants.get("STORED"):
        kinds |= {"pool_k": "*u8", "pool_v": "*u8"}
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
    made = triton.compile(source, target=H100, options=options or None)
    compiled, shared = made.asm, {"SHARED": int(made.metadata.shared)}
    found = re.findall(r"ld\.global\.[\w.]+|cp\.async\.c[ag]\.shared\.global", compiled["ptx"])
    return {kind: found.count(kind) for kind in sorted(set(found))} | resources_of(compiled["cubin"]) | shared


def resources_of(cubin: bytes) -> dict[str, int]:
    """REG: registers of a thread; STACK: bytes, which hold what had no register."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", text)}


if __name__ == "__main__":
    models = {" float16": "fp16", " of float32": "fp32"}
    facts = {
        name: facts_of(*one, next((kind for words, kind in models.items() if name.endswith(words)), "bf16"))
        for name, one in PROGRAMS.items()
    }
    print(json.dumps(facts))
