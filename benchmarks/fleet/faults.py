"""A fleet under load while replicas, gateways or Redis are broken: every answer is compared with one engine's own.

    python -m benchmarks.fleet.faults [--fault kill] [--seconds 120] [--engine ray] [--replicas 2] [--users 16]
                                      [--adapters 40] [--gateways 1] [--redis] [--out FILE.json] [--flags ...]

First one server with `--engine thread` answers every prompt with every adapter; these texts are the oracle. Then a
closed loop of --users asks the fleet, greedily and streamed, while --fault happens:
    kill     kill -9 of a replica every 10 s
    hang     SIGSTOP of a replica for 15 s, again and again
    gateway  kill -9 of the last of --gateways (2 or more), which share a cluster and a Redis
    redis    Redis, which holds the registry, killed for 10 s and started again
    update   a gateway joins with other settings of the engines, whose replicas are replaced one by one
    scale    a gateway joins that wants a replica less, then one that wants it again
    nothing  for comparison
Wrong: a text, or the part of one before an error, that is not the oracle's. Lost: an error before any token. Cut: an
error after some. Exit code 1 if an answer was wrong or lost, if a stream was cut by nothing, or without the words that
say to try again, or if the fleet was not whole again a minute later.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.fleet.breaking import BREAKING, Fleet, until_whole
from benchmarks.fleet.cluster import ray_cluster
from benchmarks.fleet.known_answers import KnownAnswers, ask_one_engine
from benchmarks.fleet.load import under_load
from benchmarks.fleet.site import Site, add_arguments, engine_flags, made_site
from benchmarks.fleet.verdict import Verdict, verdict
from benchmarks.report import RESULTS, machine
from lora_serve.commands.server_process import ServerProcess
from tests.redis_server import RedisServer

PATIENCE = 60.0  # seconds until the fleet must be whole again
ROWS = 6  # of a replica: some requests always wait without a token
NUM_PROMPTS, NUM_TOKENS = 4, 64
JOINED = ("gateway", "update", "scale")  # faults of several gateways, whose cluster is none of theirs
TOLD = 20  # failures in words; all are counted


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=list(BREAKING), default="kill")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=40)
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--redis", action="store_true", help="the registry is in a Redis")
    parser.add_argument("--out", type=Path, help="default: results/fleet-<fault>.json")
    add_arguments(parser, replicas=2)
    options = parser.parse_args(arguments)
    out: Path = options.out or RESULTS / f"fleet-{options.fault}.json"
    report, found = measured(options)
    report["command"] = "python -m benchmarks.fleet.faults " + shlex.join(arguments or sys.argv[1:])
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: value for name, value in report.items() if name not in ("machine", "settings")}))
    for line in found.failures[:TOLD]:
        print(f"FAILED: {line}", file=sys.stderr)
    return 1 if found.failures else 0


def measured(options: argparse.Namespace) -> tuple[dict[str, Any], Verdict]:
    """The report, and what was found."""
    with made_site(options.adapters, options.scratch) as site:
        known = ask_one_engine(site, NUM_PROMPTS, NUM_TOKENS)
        with _fleet(site, options) as fleet:
            found = asyncio.run(_run(fleet, known, options))
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    report = {
        "machine": machine(),
        "settings": settings,
        "counts": found.counts,
        **found.figures,
        "failures": found.failures[:TOLD],
        "num_failures": len(found.failures),
    }
    return report, found


async def _run(fleet: Fleet, known: KnownAnswers, options: argparse.Namespace) -> Verdict:
    urls = [server.url for server in fleet.gateways]
    breaking = BREAKING[options.fault]
    judged, stage = await under_load(urls, known, options.seconds, options.users, lambda stage: breaking(fleet, stage))
    found = verdict(judged, stage.events, max((one.record.ended for one in judged), default=0.0))
    found.failures += stage.unfinished
    whole = await until_whole(fleet, PATIENCE)
    found.figures["whole_again_s"] = whole
    found.figures["gateways_said"] = [line for server in fleet.gateways for line in said(server.log)]
    if whole is None:
        found.failures.append(f"not whole again after {PATIENCE:.0f} s: engines {await fleet.engines()}")
    return found


def said(log: Path) -> list[str]:
    """What a server logged of its replicas, and every warning and error; paths begin in this repository."""
    words = ("[error", "[warning", "[critical", "replica", "traceback")
    lines = log.read_text(errors="replace").replace(f"{RESULTS.parents[1]}/", "").splitlines()
    return [
        line[:300]
        for line in lines
        if any(word in line.lower() for word in words) and not any(route in line for route in ("GET /", "POST /"))
    ][-TOLD * 3 :]


@contextmanager
def _fleet(site: Site, options: argparse.Namespace) -> Iterator[Fleet]:
    """Its gateways are ready and know every adapter."""
    with ExitStack() as stack:
        more = ["--max-num-seqs", str(ROWS), "--max-loras", "8", *options.flags]
        has_others, roots = options.gateways > 1 or options.fault in JOINED, list[int]()
        store = _redis(site, stack) if options.redis or options.fault == "redis" or has_others else None
        if store is not None:
            more += ["--redis-url", store.url, *site.modules]
        if has_others:
            cluster = stack.enter_context(ray_cluster(site.root))
            roots.append(cluster.pid)
            # One core each, as other replicas would else be given other shares of the machine, and be other replicas.
            more += ["--ray-address", cluster.address, "--cpus-per-replica", "1"]
        numbers = itertools.count()

        def gateway(replicas: int, flags: Sequence[str]) -> AbstractContextManager[ServerProcess]:
            name = f"gateway-{next(numbers)}"
            own = ["--store", str(site.root / name)] if store is not None else []
            return site.server(name, engine_flags(options.engine, replicas), *more, *own, *flags)

        gateways = [stack.enter_context(gateway(options.replicas, [])) for _ in range(options.gateways)]
        roots += [server.pid for server in gateways]
        num_engines = options.replicas if options.engine == "ray" else 1
        yield Fleet(gateways, num_engines, ROWS, roots, gateway, store)


def _redis(site: Site, stack: ExitStack) -> RedisServer:
    (folder := site.root / "redis").mkdir()
    store = RedisServer(folder, append_only=True)
    store.start()
    stack.callback(store.stop)
    return store


if __name__ == "__main__":
    sys.exit(main())
