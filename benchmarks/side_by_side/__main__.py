"""One run: checkpoints, engines, rounds, report."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import SHAPES, make_checkpoints
from benchmarks.peers.environment import ROOT
from benchmarks.peers.lora_serve import LoraServe
from benchmarks.peers.processes import end_on_sigterm
from benchmarks.peers.seam import Checkpoints, Peer
from benchmarks.peers.table import OURS, members
from benchmarks.report import machine
from benchmarks.side_by_side.contest import Contest, turns
from benchmarks.side_by_side.figures import Run, same_first_token
from benchmarks.side_by_side.options import parse_options
from benchmarks.side_by_side.plot import plot
from benchmarks.side_by_side.report import make_report, markdown
from benchmarks.workload import Job, Load, Measured, make_jobs

RESULTS = ROOT / "benchmarks" / "results"
Agreement = dict[str, dict[str, float]]  # popularity -> engine -> share of equal first tokens


def main() -> int:
    options = parse_options()
    if options.redraw:
        return tell(json.loads(options.redraw.read_text()), options.redraw.with_suffix(".png"))
    load = Load(
        options.requests, options.concurrency, 16, options.max_prompt_tokens, options.output_tokens, options.seed
    )
    print(f"making the checkpoints under {options.cache.name}/ ...", flush=True)
    count = max(options.adapters, options.skewed_adapters)
    model, adapters = make_checkpoints(options.cache, options.shape, count, options.seed)
    with tempfile.TemporaryDirectory(prefix="side_by_side_") as scratch:
        checkpoints = Checkpoints(model, adapters, Path(scratch))
        contest = Contest(checkpoints, load, options.threads, partial(print, flush=True))
        try:
            enter(contest, options, list(adapters))
            runs, agreement = rounds(contest, options, list(adapters))
        finally:
            contest.close()
    report = make_report(facts(options, contest, agreement), [entry.facts() for entry in contest.entries], runs)
    file = RESULTS / f"{options.name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nwritten: {file.relative_to(ROOT)}")
    failed = tell(report, file.with_suffix(".png"))
    return failed or int(not any(run.family == OURS for run in runs))


def enter(contest: Contest, options: argparse.Namespace, adapters: list[str]) -> None:
    """Every engine asked for: families whole, members alone."""
    trial = Load(max(options.concurrency, len(adapters)), options.concurrency, 16, 128, 16, options.seed + 999)
    for name in options.engines:
        contest.enter(
            ours_or(members(name, options.dtype), options),
            partial(jobs_of_trial, trial, adapters, options.shape),
            trial,
        )


def ours_or(peers: Sequence[Peer], options: argparse.Namespace) -> Sequence[Peer]:
    """Our server gets the flags it was given besides its own."""
    flags = shlex.split(options.server_flags)
    return [LoraServe((*peer.flags, *flags)) if isinstance(peer, LoraServe) else peer for peer in peers]


def jobs_of_trial(load: Load, adapters: Sequence[str], shape: str, popularity: str) -> list[Job]:
    return jobs(load, popularity, adapters, 0, shape)


def jobs(load: Load, popularity: str, adapters: Sequence[str], number: int, shape: str) -> list[Job]:
    """Of round `number`: the same for every engine, other prompts than in any other round."""
    return make_jobs(replace(load, seed=load.seed + 1000 * number), popularity, adapters, SHAPES[shape].vocab_size)


def rounds(contest: Contest, options: argparse.Namespace, adapters: list[str]) -> tuple[list[Run], Agreement]:
    """Every engine on every popularity, round by round; the rows beside a popularity are close in time."""
    runs: list[Run] = []
    agreement: Agreement = {}
    for number in range(options.rounds):
        for popularity in options.popularity:
            names = adapters[: options.adapters] if popularity == "uniform" else adapters[: options.skewed_adapters]
            work = jobs(contest.load, popularity, names, number + 1, options.shape)
            results: dict[str, Measured] = {}
            for entry in turns(contest.entries, popularity, number):
                measured = contest.run(entry, work, contest.load)
                if measured is not None:
                    results[entry.name] = measured
                    runs.append(Run.of(entry.name, entry.peer.family, popularity, number + 1, measured))
                    print(f"round {number + 1}: {runs[-1].line()}", flush=True)
            ours = results.pop(OURS, None)
            if ours is not None:
                agreement[popularity] = {name: same_first_token(ours, theirs) for name, theirs in results.items()}
    return runs, agreement


def facts(options: argparse.Namespace, contest: Contest, agreement: Agreement) -> dict[str, Any]:
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("/")]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join(["python -m benchmarks.side_by_side", *arguments]),
        "shape": options.shape,
        "dtype": options.dtype or "each family's fastest",
        "rounds": options.rounds,
        "load": contest.settings(),
        "adapters": {"uniform": options.adapters, "skewed": options.skewed_adapters},
        "machine": machine() | {"load_average_at_the_end": [round(load, 1) for load in os.getloadavg()]},
        "same_first_token_as_lora_serve": agreement,
    }


def tell(report: dict[str, Any], picture: Path) -> int:
    """Print the table, draw the picture; 1 if any request failed."""
    print("\n" + markdown(report) + "\n")
    print(f"written: {picture.name}" if plot(report, picture) else "no picture: matplotlib is not installed")
    return int(any(median["failed"] for median in report["medians"]))


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main())
