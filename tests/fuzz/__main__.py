"""Fuzzes the parsers one after another, by atheris (libFuzzer), guided by what of the code each input reaches.

    scripts/fuzz                                      # all targets, 60 s each
    scripts/fuzz --seconds 3600 --out FILE sse tar    # an hour each of two
    scripts/fuzz --keep                               # and keep the corpora, minimised

`--seconds` is processor time. A finding (an error that is none of the target's own, an input that takes longer than
5 s or more than 512 MiB) is written to tests/fuzz/findings. The figures go into FILE, and from
benchmarks/results/fuzz.json into docs/explanation/reliability.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, machine
from tests.fuzz.inputs import MAX_MEMORY, MAX_SECONDS, NAMES, Target, keep, kept, target
from tests.fuzz.page import write_page

COMMAND = [sys.executable, "-m", "tests.fuzz.child"]
NUM_WORDS = {"stat::number_of_executed_units": "executions", "stat::peak_rss_mb": "peak_rss_mb"}
ENDS = ("crash-", "timeout-", "oom-", "leak-")  # of inputs that ended the fuzzer
HANG = 60  # seconds by the clock, for one input: the machine may be busy
MAX_LENGTH = 16384  # bytes of an input


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(NAMES)}; all of them")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=RESULTS / "fuzz.json")
    parser.add_argument("--keep", action="store_true", help="make tests/fuzz/corpus anew of what was found")
    options = parser.parse_args()
    if unknown := set(options.targets) - set(NAMES):
        parser.error(f"no target: {', '.join(sorted(unknown))}")
    figures = {}
    for name in options.targets or NAMES:
        figures[name] = fuzzed(target(name), options.seconds, options.keep)
        print(f"{name}: {figures[name]}", flush=True)
        bounds = {"seconds": MAX_SECONDS, "bytes": MAX_MEMORY}
        report = merged(options.out, {"machine": machine(), "bounds": bounds, "targets": {name: figures[name]}})
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        if options.out == RESULTS / "fuzz.json":
            write_page(report)
    found = {name: one["findings"] for name, one in figures.items() if one["findings"]}
    for name, files in found.items():
        print(f"FAILED: {name}: {', '.join(files)}", file=sys.stderr)
    return 1 if found else 0


def merged(file: Path, report: dict[str, Any]) -> dict[str, Any]:
    """The report with the figures of targets that were not fuzzed now, and with the sums over all runs so far."""
    before = json.loads(file.read_text())["targets"] if file.exists() else {}
    now = {name: {**one, "in_all": _sums(before.get(name), one)} for name, one in report["targets"].items()}
    return report | {"targets": dict(sorted({**before, **now}.items()))}


def _sums(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, int]:
    known = (before or {}).get("in_all", {})
    return {name: known.get(name, 0) + now[name] for name in ("executions", "cpu_seconds")}


def fuzzed(of: Target, seconds: float, is_kept: bool) -> dict[str, Any]:
    """Fuzzes a target for so much processor time. Returns its figures."""
    with tempfile.TemporaryDirectory(prefix="lora_serve-fuzz-") as name:
        folder = Path(name)
        (inputs := folder / "inputs").mkdir()
        (found := folder / "found").mkdir()
        starts = [*(data for _, data in kept(of)), *of.seeds()]
        for number, data in enumerate(starts):
            (inputs / f"start-{number}").write_bytes(data)
        used = runs = peak = 0
        while used < seconds and not any(file.name.startswith(ENDS) for file in found.iterdir()):
            done, spent = _run(of, found, [f"-max_total_time={int(seconds - used) + 1}"], inputs)
            used, runs, peak = used + spent, runs + done["executions"], max(peak, done["peak_rss_mb"])
        figures = {"executions": runs, "cpu_seconds": round(used), "peak_rss_mb": peak, "starts": len(starts)}
        findings = [_note(of, file) for file in sorted(found.iterdir())]
        if is_kept:
            figures["corpus"] = keep(of, _least(of, found, inputs, folder / "features"))
        return {**figures, "findings": findings}


def _run(of: Target, found: Path, options: list[str], *folders: Path) -> tuple[dict[str, int], float]:
    """One run of the fuzzer: its figures, and its seconds of the processor."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    limits = [f"-timeout={HANG}", f"-max_len={MAX_LENGTH}", "-rss_limit_mb=0", "-print_final_stats=1"]
    command = [*COMMAND, of.name, str(found), *limits, *options, *map(str, folders)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    text = done.stdout.decode(errors="replace")
    if done.returncode or "Traceback" in text:
        print(text[-20000:], file=sys.stderr)
    numbers = dict(re.findall(r"^(stat::\w+):\s*(\d+)$", text, flags=re.MULTILINE))
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {short: int(numbers.get(long, 0)) for long, short in NUM_WORDS.items()}, spent


def _least(of: Target, found: Path, inputs: Path, control: Path) -> list[bytes]:
    """The shortest inputs that reach all that the inputs reach together, as libFuzzer tells it for its own merges."""
    files = sorted(inputs.iterdir(), key=lambda file: (file.stat().st_size, file.name))
    control.write_text("\n".join([str(len(files)), "0", *map(str, files)]) + "\n")
    _run(of, found, [f"-merge_control_file={control}", "-merge_inner=1"])
    reached, chosen = set[str](), []
    for line in control.read_text().splitlines()[len(files) + 2 :]:
        kind, number, *features = line.split()
        if kind == "FT" and not reached.issuperset(features):
            reached.update(features)
            chosen.append(files[int(number)].read_bytes())
    return chosen


def _note(of: Target, file: Path) -> str:
    """Keeps an input that found a fault."""
    of.findings.mkdir(parents=True, exist_ok=True)
    (of.findings / file.name[:24]).write_bytes(file.read_bytes())
    return file.name[:24]


if __name__ == "__main__":
    sys.exit(main())
