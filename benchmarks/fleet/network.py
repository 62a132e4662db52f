"""A Ray cluster of two nodes and a gateway on a third host, any two of which are cut apart under load. For root.

    python -m benchmarks.fleet.network [--cut 10] [--rest 10] [--users 12] [--adapters 16] [--out FILE.json]
                                       [--flags ...]

Hosts are network namespaces of this machine (benchmarks/fleet/namespaces.py): `a` has the cluster's head and a replica,
`b` a node with the other replica, `g` the gateway. A closed loop asks the gateway all the time; each pair of hosts in
turn is cut apart for --cut seconds, in silence, and has --rest seconds afterwards. Exit code 1 if an answer was wrong
or lost, if more streams were cut than ran behind the cut, if nobody was served for longer than a link may be silent, or
if the gateway did not send requests to both replicas again within 5 s of healing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.fleet.cluster import own_token, ray_node
from benchmarks.fleet.faults import NUM_PROMPTS, NUM_TOKENS, ROWS, TOLD, said
from benchmarks.fleet.known_answers import KnownAnswers, ask_one_engine
from benchmarks.fleet.load import Stage, under_load
from benchmarks.fleet.namespaces import Network, network
from benchmarks.fleet.site import Site, engine_flags, made_site
from benchmarks.fleet.status import num_serving
from benchmarks.fleet.verdict import Verdict, verdict
from benchmarks.report import RESULTS, machine
from lora_serve.commands.server_process import ServerProcess

GCS_PORT = 6379
NUM_REPLICAS = 2
AGREED = 5.0  # seconds after healing until the gateway uses both replicas
SILENCE = 6.0  # seconds: a link that says nothing for 5 is lost
LOOK = 2.0  # seconds before the end of a cut, when the gateway is asked which replicas it uses
PATIENCE = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cut", type=float, default=10.0)
    parser.add_argument("--rest", type=float, default=10.0)
    parser.add_argument("--users", type=int, default=12)
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--scratch", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS / "fleet-network.json")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="the rest: more flags of the server")
    options = parser.parse_args(arguments)
    report, failures = measured(options)
    report["command"] = "python -m benchmarks.fleet.network " + shlex.join(arguments or sys.argv[1:])
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: value for name, value in report.items() if name != "machine"}))
    for line in failures[:5]:
        print(f"FAILED: {line}", file=sys.stderr)
    return 1 if failures else 0


def measured(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The report, and every broken promise in words."""
    with made_site(options.adapters, options.scratch) as site:
        known = ask_one_engine(site, NUM_PROMPTS, NUM_TOKENS)
        with network(("a", "b", "g")) as hosts, _gateway(site, hosts, options.flags) as gateway:
            found, cuts = asyncio.run(_run(hosts, gateway, known, options))
            logged = said(gateway.log)
    failures = found.failures + [failure for cut in cuts for failure in cut["failures"]]
    report = {"machine": machine(), "counts": found.counts, "cuts": cuts, **found.figures, "gateway_said": logged}
    return report | {"failures": failures[:TOLD], "num_failures": len(failures)}, failures


@contextmanager
def _gateway(site: Site, hosts: Network, flags: Sequence[str]) -> Iterator[ServerProcess]:
    """On its host, with a replica on each of the other two."""
    head = f"{hosts.addresses['a']}:{GCS_PORT}"
    with ExitStack() as stack:
        stack.enter_context(own_token(site.root))
        for host, role in {
            "a": ["--head", "--include-dashboard", "false", "--port", str(GCS_PORT)],
            "b": ["--address", head],
        }.items():
            one_core = ["--num-cpus", "1"]
            stack.enter_context(ray_node(site.root, hosts.addresses[host], [*role, *one_core], hosts.inside(host)))
        more = [
            "--auth",
            "off",
            "--ray-address",
            head,
            "--cpus-per-replica",
            "1",
            "--max-num-seqs",
            str(ROWS),
            "--max-loras",
            "8",
            *flags,
        ]
        engine = engine_flags("ray", NUM_REPLICAS)
        where: dict[str, Any] = {"host": hosts.addresses["g"], "inside": hosts.inside("g")}
        gateway = stack.enter_context(site.server("gateway", engine, *more, **where))
        if seconds_until_whole(gateway.url, PATIENCE) is None:
            raise RuntimeError(f"not all replicas came:\n{gateway.tail()}")
        yield gateway


def seconds_until_whole(url: str, patience: float) -> float | None:
    """Seconds until the gateway sends requests to every replica; None if it does not."""
    started = time.monotonic()
    while time.monotonic() - started < patience:
        if num_serving(url) == NUM_REPLICAS:
            return round(time.monotonic() - started, 2)
        time.sleep(0.1)
    return None


async def _run(
    hosts: Network, gateway: ServerProcess, known: KnownAnswers, options: argparse.Namespace
) -> tuple[Verdict, list[dict[str, Any]]]:
    pairs = list(itertools.combinations(hosts.addresses, 2))
    cuts: list[dict[str, Any]] = []

    async def breaking(stage: Stage) -> None:
        for pair in pairs:
            await asyncio.sleep(options.rest)
            since = stage.now
            with hosts.cut(*pair):
                await asyncio.sleep(options.cut - LOOK)
                looking = asyncio.ensure_future(asyncio.to_thread(num_serving, gateway.url))
                await asyncio.sleep(LOOK)
            stage.note(f"{' and '.join(pair)} were cut apart", since, may_cut=ROWS if "g" in pair else 0)
            agreed = await asyncio.to_thread(seconds_until_whole, gateway.url, options.rest + PATIENCE)
            cuts.append({"hosts": pair, "at": round(since, 1), "replicas_used": await looking, "agreed_s": agreed})

    seconds = len(pairs) * (options.cut + options.rest) + options.rest
    judged, stage = await under_load([gateway.url], known, seconds, options.users, breaking)
    found = verdict(judged, stage.events, max((one.record.ended for one in judged), default=0.0))
    times = sorted(chunk.time for one in judged for chunk in one.record.chunks)
    for cut in cuts:
        cut["longest_silence_s"] = _longest_silence(times, cut["at"], cut["at"] + options.cut)
        cut["failures"] = list(_failures(cut))
    return found, cuts


def _longest_silence(times: Sequence[float], start: float, end: float) -> float:
    within = [start, *(time for time in times if start < time < end), end]
    return round(max(later - earlier for earlier, later in itertools.pairwise(within)), 2)


def _failures(cut: dict[str, Any]) -> Iterator[str]:
    name = " and ".join(cut["hosts"])
    if cut["longest_silence_s"] > SILENCE:
        yield f"{name}: nobody was served for {cut['longest_silence_s']} s"
    if cut["agreed_s"] is None or cut["agreed_s"] > AGREED:
        yield f"{name}: both replicas served again {cut['agreed_s']} s after healing"


if __name__ == "__main__":
    sys.exit(main())
