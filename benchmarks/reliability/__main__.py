"""What the server withstands, in figures: checked answers under eviction races, storms of disconnects, overload, soak.

    python -m benchmarks.reliability [--answers 20000] [--disconnects 5000] [--soak-minutes 10]
        [--registry-minutes 5] [--out FILE] [--no-docs]

Every answer is compared with transformers (one adapter merged at a time) and PEFT; in bfloat16, where rounding may
choose another token, with the server's own of one request at a time, to the bit. Each part runs a server of its own
on a tiny random model: the races with 1, 2 and 4 slots for 64 adapters (the engine in the server and in a process of
its own) while ids are registered and deleted; the storm of clients that hang up at any moment; ten times the requests
that may wait; and a soak of races and disconnects, in float32 and in bfloat16, during which memory, descriptors and
threads are read every few seconds: their slope is that of a least-squares line through the second half. Three servers
on one Redis are broken in turn, with their networks and Redis, and a judge of linearizability reads what their clients
saw (tests/consistency). Exit code 1 if one answer was wrong, something stayed behind, or memory grew. The figures go
into FILE and, between two marks, into docs/explanation/reliability.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.reliability import page
from benchmarks.reliability.races import races
from benchmarks.reliability.registry import registry
from benchmarks.reliability.site import make_site
from benchmarks.reliability.soak import soak
from benchmarks.reliability.storms import disconnects, overload
from benchmarks.report import judged, machine

RESULTS = Path(__file__).parents[1] / "results" / "reliability.json"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=20_000)
    parser.add_argument("--disconnects", type=int, default=5_000)
    parser.add_argument("--soak-minutes", type=float, default=10.0)
    parser.add_argument("--registry-minutes", type=float, default=5.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--no-docs", action="store_true", help="leave docs/explanation/reliability.md as it is")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="lora_serve-reliability-") as folder:
        site = make_site(Path(folder))
        report = {
            "machine": machine(),
            "races": races(site, options.answers),
            "disconnects": disconnects(site, options.disconnects),
            "overload": overload(site),
            "registry": registry(Path(folder) / "registry", options.registry_minutes),
            "soaks": [soak(site, options.soak_minutes, dtype) for dtype in ("float32", "bfloat16")],
        }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    return judged(report, page, write=not options.no_docs)


if __name__ == "__main__":
    sys.exit(main())
