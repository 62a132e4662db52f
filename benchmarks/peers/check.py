"""Whether an engine computes what PEFT computes: greedy tokens on a small model in float32, base and with adapters."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.checkpoints import VOCAB_SIZE, make_checkpoints
from benchmarks.peers.environment import ROOT
from benchmarks.peers.peft import Peft
from benchmarks.peers.seam import Checkpoints, Peer
from benchmarks.workload import Job, Load, Measured, make_jobs

LOAD = Load(num_requests=12, concurrency=4, min_prompt_tokens=4, max_prompt_tokens=60, output_tokens=12)
SHAPE = "4m"  # heads of 32: vLLM has no attention for smaller ones


def check(peer: Peer, num_threads: int = 1) -> dict[str, float]:
    """Per popularity the share of requests whose tokens are all those of PEFT in float32. Raises PeerError."""
    model, adapters = make_checkpoints(ROOT / ".benchmarks", SHAPE, 4, seed=0)
    work = {name: make_jobs(LOAD, name, list(adapters), VOCAB_SIZE) for name in peer.popularities}
    with tempfile.TemporaryDirectory() as scratch:
        checkpoints = Checkpoints(model, adapters, Path(scratch))
        expected = _run(Peft("float32"), checkpoints, list(work.values()), num_threads)
        found = _run(peer, checkpoints, list(work.values()), num_threads)
    return {name: _share(a, b) for name, a, b in zip(work, expected, found, strict=True)}


def _run(peer: Peer, checkpoints: Checkpoints, work: Sequence[list[Job]], num_threads: int) -> list[Measured]:
    engine = peer.start(checkpoints, LOAD, num_threads)
    try:
        return [engine.run(jobs, LOAD) for jobs in work]
    finally:
        engine.stop()


def _share(expected: Measured, found: Measured) -> float:
    tokens = {sample.index: sample.token_ids for sample in found.samples}
    equal = [tokens.get(sample.index) == sample.token_ids for sample in expected.samples]
    return sum(equal) / len(equal)
