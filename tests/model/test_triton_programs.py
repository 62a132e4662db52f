"""The Triton programs compile for a GPU that is not here, and read weights 16 bytes at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_programs_compile_and_weights_come_in_whole_vectors(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.compiled_programs"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    loads = json.loads(done.stdout)
    assert set(loads) == {
        *("shrink_rows", "expand_rows", "shrink_tiles", "expand_tiles"),
        *("decode_chunks", "fold_chunks", "attend_tiles"),
    }
    for name in ("shrink_rows", "expand_rows", "expand_tiles"):
        assert loads[name]["ld.global.v4.b32"] >= 8, loads
    for name in ("shrink_tiles", "decode_chunks", "attend_tiles"):
        assert loads[name]["cp.async.cg.shared.global"] >= 8, loads
    assert not any(kind.endswith("b16") for found in loads.values() for kind in found), loads
