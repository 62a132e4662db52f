"""A real server in its own process, whose batcher is tuned between two runs."""

from __future__ import annotations

import http.client
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import VOCAB_SIZE, make_adapters, make_checkpoints
from benchmarks.http_load import run_http
from benchmarks.workload import Job, Load, make_jobs
from lora_serve.commands.server_process import HOST, ServerProcess

ADMIN_KEY = "admin-key-of-the-bench"
BASE = "bench-base"
OPEN = {
    "max_num_seqs": 32, "max_num_batched_tokens": 512, "batch_wait_ms": 0, "preferred_batch_size": 0,
    "latency_target_ms": 0, "inter_token_target_ms": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TunedServer:
    """`names`: its adapters, all on the device."""

    url: str
    port: int
    names: Sequence[str]

    def tune(self, **fields: float) -> None:
        """These limits, and for the others what OPEN says. Raises RuntimeError."""
        self._call("PUT", json.dumps(OPEN | fields))

    def engine(self) -> dict[str, Any]:
        """GET /admin/engine once nobody runs or waits."""
        while (found := self._call("GET"))["num_running"] or found["num_waiting"]:
            time.sleep(0.05)
        return found

    def jobs(self, count: int, load: Load) -> list[Job]:
        """`count` requests of all adapters evenly, no two prompts alike."""
        spread = Load(count, load.concurrency, load.min_prompt_tokens, load.max_prompt_tokens, seed=load.seed)
        return make_jobs(spread, "uniform", self.names, VOCAB_SIZE)

    def capacity(self, load: Load) -> float:
        """Requests a second of a closed loop with every limit open; the second of two runs counts."""
        self.tune()
        for _ in range(2):
            measured = run_http(self.url, BASE, self.jobs(load.num_requests, load), load)
        return len(measured.samples) / measured.seconds

    def _call(self, method: str, body: str | None = None) -> dict[str, Any]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=60)
        headers = {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": "application/json"}
        connection.request(method, "/admin/engine", body, headers)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status} {text.decode()}")
        return dict(json.loads(text))


@contextmanager
def tuned_server(cache: Path, shape: str, num_adapters: int) -> Iterator[TunedServer]:
    """Started, with its adapters registered and used once."""
    model, _ = make_checkpoints(cache, shape, 0, seed=0)
    folders = make_adapters(cache, shape, num_adapters, seed=0, rank=16)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [
            "--model", str(model), "--served-model-name", BASE, "--admin-key", ADMIN_KEY,
            "--admin-acts-per-minute", "0",
            "--store", f"{scratch}/store",
            "--max-loras", str(num_adapters), "--max-num-seqs", str(OPEN["max_num_seqs"]), "--max-num-batched-tokens",
            str(OPEN["max_num_batched_tokens"]), "--max-model-len", "1024", "--no-enable-prefix-caching",
        ]  # fmt: skip
        for name, folder in folders.items():
            arguments += ["--lora-modules", f"{name}={folder}"]
        with ServerProcess(arguments, Path(scratch) / "log") as server:
            server.wait_until_ready(300)
            yield TunedServer(server.url, server.port, list(folders))
