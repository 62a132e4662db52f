"""The first request after /ready against later ones of the same kind: what a warm-up leaves cold.

    python -m benchmarks.first_request [--kinds completion chat ...] [--starts 3] [--later 15] [--warmup auto]

Each kind has servers of its own, started anew, on the demo model with the demo tenants' adapters; the first request is
the first of all. Prompts are of one length and all different, so that no cache helps the later ones. The client's side
was warmed up by GET /version on the same connection. A ratio is the first request's time over the later ones' median;
of the starts the median counts, as one scheduler's hiccup is as long as a request. `cpu`: likewise of the time that the
server's threads ran (Linux' schedstat), which busy neighbours change less. Milliseconds.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import machine
from lora_serve.commands.demo import BASE, DATA, adapter_folders
from lora_serve.commands.server_process import HOST, ServerProcess

Body = dict[str, Any]
Make = Callable[[str, str], tuple[str, Body]]  # text, adapter -> path, body
WORDS = ("customer", "invoice", "parcel", "router", "ticket", "refund", "doctor", "lesson")
MAX_TOKENS = 8


def _completion(**fields: Any) -> Make:
    return lambda text, adapter: (
        "/v1/completions",
        {"model": BASE, "prompt": text, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, **fields},
    )


def _of_adapter(text: str, adapter: str) -> tuple[str, Body]:
    path, body = _completion()(text, adapter)
    return path, body | {"model": adapter}


def _chat(text: str, adapter: str) -> tuple[str, Body]:
    messages = [{"role": "user", "content": text}]
    fields = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    return "/v1/chat/completions", {"model": adapter, "messages": messages, **fields}


KINDS: dict[str, Make] = {
    "completion": _completion(),
    "chat": _chat,
    "streaming": _completion(stream=True, stream_options={"include_usage": True}),
    "adapter": _of_adapter,
    "sampled": _completion(temperature=0.8, top_p=0.9, top_k=20, seed=1),
    "penalties": _completion(temperature=0.8, presence_penalty=0.5, repetition_penalty=1.1, logit_bias={"5": 1.0}),
    "logprobs": _completion(logprobs=3, echo=True),
    "several": _completion(n=4, temperature=1.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--later", type=int, default=15)
    parser.add_argument("--warmup", choices=("auto", "full", "off"), default="auto")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/first-request.json"))
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    for kind in options.kinds:
        found[kind] = [_measure(KINDS[kind], options.later, options.warmup) for _ in range(options.starts)]
        print(
            f"{kind:12}", "  ".join(f"{name} {value:.2f}" for name, value in _medians(found[kind]).items()), flush=True
        )
    facts = {"machine": machine(), "warmup": options.warmup, "starts": options.starts, "later": options.later}
    report = {**facts, "medians": {kind: _medians(rows) for kind, rows in found.items()}, "starts_of": found}
    options.out.write_text(json.dumps(report, indent=1) + "\n")


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def _measure(make: Make, num_later: int, warmup: str) -> dict[str, float]:
    """One start of a server."""
    adapters = adapter_folders()
    with tempfile.TemporaryDirectory() as folder:
        store, log = Path(folder) / "store", Path(folder) / "log"
        arguments = ["--model", str(DATA / "model"), "--served-model-name", BASE, "--store", str(store)]
        arguments += ["--warmup", warmup]
        for name, path in adapters.items():
            arguments += ["--lora-modules", f"{name}={path}"]
        start = time.perf_counter()
        with ServerProcess(arguments, log) as server:
            server.wait_until_ready(300)
            ready = time.perf_counter() - start
            adapter = next(iter(adapters))
            connection = http.client.HTTPConnection(HOST, server.port, timeout=60)
            for _ in range(5):
                _time(connection, "GET", "/version", None)
            times, cpu = [], [_cpu(server.pid)]
            for number in range(num_later + 1):
                times.append(_time(connection, "POST", *make(_text(number), adapter)))
                cpu.append(_cpu(server.pid))
            connection.close()
    return {
        **_against_later(times, ""),
        **_against_later([after - before for before, after in itertools.pairwise(cpu)], "cpu_"),
        "ready_s": ready,
    }


def _against_later(times: list[float], prefix: str) -> dict[str, float]:
    later = statistics.median(times[1:])
    figures = {"ratio": times[0] / later, "first": times[0], "later": later, "slowest_later": max(times[1:])}
    return {prefix + name: value for name, value in figures.items()}


def _cpu(pid: int) -> float:
    """Milliseconds that the process' threads have run."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e6


def _text(number: int) -> str:
    """Texts of as many tokens that begin differently."""
    return " ".join(WORDS[(number // 8**place + place) % 8] for place in range(12))


def _time(connection: http.client.HTTPConnection, method: str, path: str, body: Body | None) -> float:
    """Milliseconds from sending to the last byte."""
    payload = None if body is None else json.dumps(body).encode()
    start = time.perf_counter()
    connection.request(method, path, payload, {"Content-Type": "application/json"} if payload else {})
    response = connection.getresponse()
    answer = response.read()
    elapsed = 1000 * (time.perf_counter() - start)
    if response.status != 200:
        raise SystemExit(f"{path}: {response.status} {answer[:500]!r}")
    return elapsed


if __name__ == "__main__":
    main()
