"""The Triton programs compile for a GPU that is not here, read weights 16 bytes at a time, and keep to registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_SHARED = 99 * 1024  # bytes of a program: every GPU since Ampere has them, an H100 twice


def test_programs_compile_to_whole_vectors_and_without_spills(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.compiled_programs"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    tiles = ("shrink_tiles", "shrink_tiles float32", "shrink_tiles float16")
    tiles += ("expand_tiles", "expand_tiles float32", "expand_tiles float16")
    rows = ("shrink_rows", "shrink_rows of experts", "expand_rows", "expand_rows of experts")
    experts = ("sort_pairs", "multiply_tiles", "multiply_tiles of float32")
    codes = {f"{name} {stored}" for name in ("decode_chunks", "attend_tiles") for stored in ("int8", "fp8")}
    assert set(facts) == {*rows, *tiles, *experts, "decode_chunks", "fold_chunks", "attend_tiles", *codes}
    for name in (*rows, *tiles[3:]):
        assert facts[name]["ld.global.v4.b32"] >= 8, facts
    for name in (*tiles[:3], *experts[1:], "decode_chunks", "attend_tiles"):
        assert facts[name]["cp.async.cg.shared.global"] >= 8, facts
    assert facts["fold_chunks"]["ld.global.v4.b32"] >= 4, facts
    assert not any(kind.endswith("b16") for found in facts.values() for kind in found), facts
    assert not any(found["STACK"] for found in facts.values()), facts
    assert max(found["SHARED"] for found in facts.values()) <= MOST_SHARED, facts
    assert facts["shrink_tiles"]["REG"] <= 64, facts  # with float32's products in the same program: 184
    assert facts["multiply_tiles"]["REG"] <= 80, facts  # 64: three programs of 128 threads fit beside their inputs
    for name in rows[2:]:
        assert facts[name]["REG"] <= 200, facts  # 190; with a piece's first column of any number: 214
