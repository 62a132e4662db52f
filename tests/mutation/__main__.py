"""Breaks the program by cosmic-ray's operators, one place at a time: does the default tier of the tests see it?

    scripts/mutate                                # 200 mutants, drawn by seed 1
    scripts/mutate --number 20 --seed 7 --out FILE
    scripts/mutate --again                        # of the last run's sample only those that survived

Each mutant meets the tests that run its line (tests/mutation/reach.py), those of its own folder first, until one fails;
all of them passed on the sound program. A test that takes 30 s hangs, which counts as seen. Exits with 1 below 90 %.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, machine
from tests.mutation.copies import Copies, Copy, Run
from tests.mutation.harmless import reasons
from tests.mutation.mutants import Mutant, drawn
from tests.mutation.page import killed_share, write_page
from tests.mutation.places import FOLDERS
from tests.mutation.reach import MOST_SECONDS, Reach, measured

AIM = 0.9
START = 120.0  # seconds that importing tests and their fixtures may take beside the tests


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "mutation.json")
    parser.add_argument("--again", action="store_true", help="only those of the sample that survived in --out")
    parser.add_argument("--at-once", type=int, default=2, help="mutants that are run side by side")
    parser.add_argument("--before", default="", metavar="WORDS", help="words before each run of tests, such as `nice`")
    options = parser.parse_args()
    last: dict[str, Any] = {"mutants": [], "runs": []}
    if options.again:
        last = json.loads(options.out.read_text())
    known = dict(_settled(last["mutants"]))
    copies = Copies(options.at_once, tuple(shlex.split(options.before)))
    reach = measured(copies)
    sample = drawn(options.number, options.seed)
    report: dict[str, Any] = {
        "command": "scripts/mutate",
        "machine": machine(),
        "sample": {"number": options.number, "seed": options.seed},
        "asked": _asked(reach),
        "runs": last["runs"],
        "mutants": [known[mutant.key] for mutant in sample if mutant.key in known],
    }
    for entry in _all(copies, [mutant for mutant in sample if mutant.key not in known], reach):
        report["mutants"].append(entry)
        options.out.write_text(json.dumps(report, indent=1) + "\n")  # `--again` goes on from here
        place = f"{entry['file']}:{entry['line']} {entry['operator']}"
        print(f"{entry['outcome']}: {place}: {entry['becomes']} ({entry.get('by', '')})", flush=True)
    report["mutants"].sort(key=lambda entry: (entry["file"], entry["line"]))
    counts = {
        name: sum(entry["outcome"] == name for entry in report["mutants"])
        for name in ("killed", "survived", "harmless")
    }
    report["runs"].append({"date": report["machine"]["date"], "commit": report["machine"]["commit"], **counts})
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(counts)
    if options.out == RESULTS / "mutation.json":
        write_page(report)
    return int(killed_share(counts) < AIM)


def _key(entry: dict[str, Any]) -> tuple[str, str, str, int]:
    return entry["file"], entry["text"], entry["operator"], entry["nth"]


def _settled(entries: list[dict[str, Any]]) -> Iterator[tuple[tuple[str, str, str, int], dict[str, Any]]]:
    """Of an earlier run: those that were killed, and survivors that have been named harmless since."""
    named = reasons()
    for entry in entries:
        key = _key(entry)
        if entry["outcome"] == "killed":
            yield key, entry
        elif key in named:
            yield key, {**entry, "outcome": "harmless", "reason": named[key]}


def _asked(reach: Reach) -> dict[str, Any]:
    """The tests that can be asked; those that failed on the sound program are not."""
    return {"folders": FOLDERS, "tests": len(reach.seconds), "seconds": MOST_SECONDS, "left_out": reach.failed}


def _all(copies: Copies, mutants: Iterable[Mutant], reach: Reach) -> Iterator[dict[str, Any]]:
    """What came of each mutant, in the order in which they end."""
    known = reasons()

    def one(mutant: Mutant) -> dict[str, Any]:
        with copies.borrowed() as copy:
            came = met(copy, mutant, reach)
        if came["outcome"] == "survived" and mutant.key in known:
            came |= {"outcome": "harmless", "reason": known[mutant.key]}
        facts = {name: getattr(mutant, name) for name in ("file", "line", "text", "operator", "nth")}
        return {**facts, "becomes": mutant.change(), **came}

    with ThreadPoolExecutor(copies.number) as pool:
        for ended in as_completed([pool.submit(one, mutant) for mutant in mutants]):
            yield ended.result()


def met(copy: Copy, mutant: Mutant, reach: Reach) -> dict[str, Any]:
    """What came of a mutant: the test that saw it and how, or the number of tests that did not."""
    tests = reach.tests(mutant.file, mutant.line, mutant.sound())
    if not tests:
        return {"outcome": "survived", "tests": 0}
    with copy.broken(mutant.file, mutant.source()):
        done = copy.first_failure(tests, START + 2 * sum(reach.seconds[test] for test in tests))
    failed = next((line for line in done.record if line["failed"]), None)
    if failed is None:
        return _without_a_test(done, len(tests), mutant)
    is_import = failed["test"] not in reach.seconds  # a file that cannot be imported
    how = "hang" if failed["hang"] else "import" if is_import else "failure"
    return {"outcome": "killed", "by": failed["test"], "how": how}


def _without_a_test(done: Run, number: int, mutant: Mutant) -> dict[str, Any]:
    if done.code == 0:
        return {"outcome": "survived", "tests": number}
    if done.code is None:
        return {"outcome": "killed", "by": done.record[-1]["test"] if done.record else "the start", "how": "hang"}
    if "ImportError while loading conftest" in done.output or "Traceback" in done.output:
        return {"outcome": "killed", "by": "tests/conftest.py", "how": "import"}
    sys.exit(f"{mutant}: pytest ended with {done.code}\n{done.output[-3000:]}")


if __name__ == "__main__":
    sys.exit(main())
