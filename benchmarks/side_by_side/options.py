"""What a side by side is asked for."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from benchmarks.checkpoints import SHAPES
from benchmarks.peers.environment import ROOT
from benchmarks.peers.seam import POPULARITIES
from benchmarks.peers.table import ALL, DTYPES, families, members

DESCRIPTION = """The same closed-loop load against this server and its peers in one run, alternating round by round.

64 requests, 16 at a time, prompts of 16-256 random tokens, 64 new tokens, greedy; adapters of ranks 8/16/32 on all
linear layers of a model of random weights (made once, kept in .benchmarks/). Popularities: base only; identical: one
adapter for all; uniform: 16 adapters evenly; skewed: 32 by Zipf's law. Prompts are new in each round, prefix caches are
off, every engine has the same threads, one works at a time. A family's configurations (dtypes) are tried once and
the fastest is measured. A peer that cannot be installed or started is reported with its reason.

    python -m benchmarks.peers install vllm llama_cpp       once
    python -m benchmarks.side_by_side                       everything; benchmarks/results/side-by-side.{json,png}
    python -m benchmarks.side_by_side --quick               for a look, not for figures
    python -m benchmarks.side_by_side --engines lora_serve llama_cpp-f16 --popularity base uniform
    python -m benchmarks.side_by_side --dtype bfloat16 --engines lora_serve vllm-lora-off --popularity base
    python -m benchmarks.side_by_side --redraw benchmarks/results/side-by-side.json
"""


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*dict.fromkeys([*families(), *(peer.name for peer in ALL)])]
    parser.add_argument("--shape", choices=list(SHAPES), default="135m", help="of the model")
    parser.add_argument("--engines", nargs="+", choices=names, default=list(families()), help="families or members")
    parser.add_argument("--popularity", nargs="+", choices=POPULARITIES, default=list(POPULARITIES))
    parser.add_argument("--rounds", type=int, help="medians are reported; default 5, and 3 for larger shapes")
    parser.add_argument("--requests", type=int, default=64, help="per popularity and round")
    parser.add_argument("--concurrency", type=int, default=16, help="requests under way at once; a static batch's size")
    parser.add_argument("--output-tokens", type=int, default=64, help="new tokens of each request")
    parser.add_argument("--max-prompt-tokens", type=int, default=256, help="prompts have 16 to so many tokens")
    parser.add_argument("--adapters", type=int, default=16, help="of uniform")
    parser.add_argument("--skewed-adapters", type=int, default=32, help="of skewed")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each engine")
    parser.add_argument("--dtype", choices=list(DTYPES), help="of every engine; else each family's fastest in a trial")
    parser.add_argument("--server-flags", default="", help="more flags for lora_serve, in one string")
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and the adapters' order")
    parser.add_argument("--quick", action="store_true", help="16 requests of 8 new tokens, one round, 4 adapters")
    parser.add_argument("--name", default="side-by-side", help="benchmarks/results/NAME.json and NAME.png")
    parser.add_argument("--cache", type=Path, default=ROOT / ".benchmarks", help="folder of the checkpoints")
    parser.add_argument("--redraw", type=Path, metavar="FILE.json", help="only the table and the picture of a report")
    options = parser.parse_args(arguments)
    for name in options.engines:
        if not members(name, options.dtype):
            parser.error(f"--dtype {options.dtype}: {name} has no such configuration")
    if options.quick:
        options.requests, options.output_tokens, options.rounds = 16, 8, 1
        options.adapters = options.skewed_adapters = 4
    if options.rounds is None:
        options.rounds = 5 if options.shape in ("135m", "38m", "4m", "tiny") else 3
    return options
