"""Everything at once on each engine host, for an hour: 200 000 checked answers while all that can change does.

    python -m benchmarks.soak [--minutes 20] [--engines thread process ray] [--out FILE] [--no-docs]

Each host gets a server of its own (a fleet: two replicas) for so many minutes. Tenants ask and ask by stream (compared
with transformers, one adapter merged at a time), ask for JSON of a schema and for calls of tools (judged by
`jsonschema`), and hang up, while adapters, versions, canaries, aliases, tenants, quotas and keys are made, changed and
deleted. In the first quarter engines are killed; whoever is hit must be told to try again. In the second half memory,
descriptors and threads of all processes are judged. Exit code 1 if an answer was wrong, anything acknowledged was
lost, or a bound of `page.py` was missed. A host that was not run stays in FILE as it was.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fleet.site import ENGINES
from benchmarks.report import RESULTS, commit, judged, machine
from benchmarks.soak import page
from benchmarks.soak.one_host import soak
from benchmarks.soak.site import make_site


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="of each host; 0: only the page is written")
    parser.add_argument("--engines", choices=ENGINES, nargs="+", default=list(ENGINES))
    parser.add_argument("--out", type=Path, default=RESULTS / "soak.json")
    parser.add_argument("--no-docs", action="store_true", help="leave docs/explanation/reliability.md as it is")
    options = parser.parse_args(arguments)
    report: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"hosts": []}
    if options.minutes:
        for hosts in _measured(options, {part["engine"]: part for part in report["hosts"]}):
            report = {"machine": machine(), "command": "python -m benchmarks.soak", "hosts": hosts}
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    return judged(report, page, write=not options.no_docs)


def _measured(options: argparse.Namespace, known: dict[str, Any]) -> Iterator[list[Any]]:
    """All hosts' figures after each host that was run."""
    with tempfile.TemporaryDirectory(prefix="lora_serve-soak-") as folder:
        site = make_site(Path(folder))
        for engine in options.engines:
            known[engine] = {"commit": commit(), **soak(site, engine, options.minutes)}
            yield [known[one] for one in ENGINES if one in known]


if __name__ == "__main__":
    sys.exit(main())
