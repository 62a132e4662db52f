"""What nobody does by hand: 10 000 loads and unloads, 100 000 adapters, 1 000 uploads at once, 10 000 open streams.

    python -m benchmarks.endurance [--cycles N] [--adapters N ...] [--uploads N] [--streams N] [--out FILE] [--no-docs]

Each part runs servers of its own on a tiny random model (0: the part is left as FILE has it). Memory and counts are
what they are; times are of a machine that may be busy, so the page gives them as ratios between sizes. Exit code 1 if
an answer was wrong, something stayed behind, or a figure grew beyond its bound (`page.py`). The figures go into FILE
and, between two marks, into docs/explanation/reliability.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.endurance import page
from benchmarks.endurance.cycles import cycles
from benchmarks.endurance.registered import COUNTS, registered
from benchmarks.endurance.streams import streams
from benchmarks.endurance.uploads import uploads
from benchmarks.reliability.site import make_site
from benchmarks.report import RESULTS, judged, machine


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=10_000)
    parser.add_argument("--adapters", type=int, nargs="+", default=list(COUNTS))
    parser.add_argument("--uploads", type=int, default=1_000)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=RESULTS / "endurance.json")
    parser.add_argument("--no-docs", action="store_true", help="leave docs/explanation/reliability.md as it is")
    options = parser.parse_args(arguments)
    report: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    report |= {"machine": machine(), "command": "python -m benchmarks.endurance"}
    with tempfile.TemporaryDirectory(prefix="lora_serve-endurance-") as folder:
        site = make_site(Path(folder))
        if options.cycles:
            report["cycles"] = cycles(site, options.cycles)
        if options.uploads:
            report["uploads"] = uploads(site, options.uploads)
        if options.streams:
            report["streams"] = streams(site, options.streams)
        if any(options.adapters):
            report["registered"] = registered(site, options.adapters)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    return judged(report, page, write=not options.no_docs)


if __name__ == "__main__":
    sys.exit(main())
