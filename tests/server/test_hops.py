"""The way of a streamed chat from the socket to the tokens and back stays short: scripts/hops.py says what a hop is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_HOPS = 35
MAX_GENERATORS = 2  # the engine client's, and the one that makes text of events


def test_streamed_chat_takes_few_hops_and_each_token_crosses_two_generators() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / "hops.py"], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    counted = [call for call in found["way"] if call.lstrip()[0].isdigit()]
    assert len(counted) == found["hops"] <= MAX_HOPS, "\n".join(counted)
    assert len(found["generators_per_token"]) <= MAX_GENERATORS, found["generators_per_token"]
    assert all(found["what each file is for"].values())
