"""Cold loads: what one costs by phase, and what a storm of them does to tenants that are being served.

    python -m benchmarks.cold_loads [--shape 135m] [--adapters 200] [--pairs 4] [--seconds 20] [--out FILE.json]

"split": one adapter of rank 16 from a page cache that is warm: its own files, then its prepared file; medians, ms.
"storm": a real server with few slots and little host memory. Four warm tenants, pinned, stream; their inter-token times
are taken in pairs of windows, quiet and under a storm that loads adapter after adapter: by prefetch, or by requests of
a few tokens. "warm-requests" is what those requests cost by themselves: the same, for adapters that stay on the device.
The ratio is that of the medians over the windows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import SHAPES, make_adapters, make_checkpoints
from benchmarks.cold_split import PHASES, load_split
from benchmarks.report import machine, percentiles
from benchmarks.storm import Site, Storm, gaps_of_window, register, warm_up
from lora_serve.commands.server_process import ServerProcess

NUM_WARM = 4
NUM_SLOTS = 8
LEAST_HOST_BYTES = 2**22  # for the adapter of the warm-up
ADMIN_KEY = "admin-key-of-the-bench"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--adapters", type=int, default=200, help="cold ones, beside the warm")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each window")
    parser.add_argument("--cache", type=Path, default=Path(".benchmarks"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cold-loads.json"))
    options = parser.parse_args()
    model, _ = make_checkpoints(options.cache, options.shape, 0, seed=0)
    folders = make_adapters(options.cache, options.shape, NUM_WARM + options.adapters, seed=0, rank=16)
    split = load_split(model, next(iter(folders.values())))
    for kind, figures in split.items():
        print(f"{kind:10}", "  ".join(f"{phase} {figures[phase]:7.2f} ms" for phase in PHASES))
    storm = run_storm(model, folders, options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    facts = {
        "machine": machine(),
        "shape": options.shape,
        "num_adapters": options.adapters,
        "slots": NUM_SLOTS,
        "pairs": options.pairs,
        "window_seconds": options.seconds,
    }
    options.out.write_text(json.dumps({**facts, "split_ms": split, "storm": storm}, indent=1) + "\n")


def run_storm(model: Path, folders: dict[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    """Per kind of storm the windows and what came of them."""
    num_bytes = max(folder.joinpath("adapter_model.safetensors").stat().st_size for folder in folders.values())
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [
            "--model", str(model), "--served-model-name", "bench-base", "--admin-key", ADMIN_KEY,
            "--admin-acts-per-minute", "0",
            "--store", f"{scratch}/store", "--adapter-root", str(options.cache.resolve()),
            "--max-loras", str(NUM_SLOTS), "--adapter-host-memory", str(max(LEAST_HOST_BYTES, NUM_SLOTS * num_bytes)),
            "--max-cpu-loras", str(NUM_SLOTS),
            "--max-num-seqs", "16",
        ]  # fmt: skip
        with ServerProcess(arguments, Path(scratch) / "log") as server:
            server.wait_until_ready(600)
            return asyncio.run(_storms(server.url, folders, options))


async def _storms(url: str, folders: dict[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    names = list(folders)
    warm, cold = names[:NUM_WARM], names[NUM_WARM:]
    async with Site.at(url, ADMIN_KEY) as site:
        await register(site, folders)
        await warm_up(site, warm)
        kinds = {"prefetch": cold, "requests": cold, "warm-requests": cold[: NUM_SLOTS - NUM_WARM]}
        return {kind: await _pairs(site, warm, names, kind, options) for kind, names in kinds.items()}


async def _pairs(
    site: Site, warm: list[str], cold: list[str], kind: str, options: argparse.Namespace
) -> dict[str, Any]:
    windows: list[dict[str, Any]] = []
    for _ in range(options.pairs):
        for storm in (None, Storm(site, cold, kind)):
            gaps = await gaps_of_window(site, warm, options.seconds, storm)
            loads = {"loads": storm.num_done, "failed": storm.num_failed} if storm else {}
            windows.append({"storm": storm is not None, "tokens": len(gaps), "itl_ms": percentiles(gaps), **loads})
            print(f"{kind:13}", json.dumps(windows[-1]), flush=True)
    return {"windows": windows, **{f"{share}_ratio": _ratio(windows, share) for share in ("p50", "p99")}}


def _ratio(windows: list[dict[str, Any]], share: str) -> float:
    """Under the storm to quiet: medians over the windows."""
    figures = {
        is_storm: statistics.median(window["itl_ms"][share] for window in windows if window["storm"] == is_storm)
        for is_storm in (False, True)
    }
    return round(figures[True] / figures[False], 3) if figures[False] else 0.0


if __name__ == "__main__":
    main()
