"""A made-up engine as the stream tells it: frames of steps on made-up time, for pages without a server's model."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from typing import Any

CHUNK = 128  # tokens of a prompt in one step


def digest_of(name: str) -> str:
    """The digest of a made-up adapter."""
    return f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"


@dataclass
class Row:
    """One request in the made-up engine."""

    id: str
    adapter: str
    num_prompt: int
    max_output: int
    arrived: float
    ready: float  # when its adapter is loaded
    state: str = "waiting"
    num_computed: int = 0
    num_output: int = 0
    first_token_ms: float | None = None
    until: float = 0.0  # preempted until then

    def told(self, replica: str) -> dict[str, Any]:
        use = {"name": self.adapter, "version": 1, "digest": digest_of(self.adapter), "scale": 1.0}
        return {
            "id": self.id,
            "replica": replica,
            "tenant": self.adapter.partition("/")[0],
            "adapters": [use] if "/" in self.adapter else [],
            "state": self.state,
            "num_prompt": self.num_prompt,
            "num_computed": self.num_computed,
            "num_output": self.num_output,
            "num_cached": 0,
            "arrived": self.arrived,
            "first_token_ms": self.first_token_ms,
            "reason": "stop" if self.state == "finished" else None,
        }


@dataclass
class MadeUpEngine:
    """Rows of several adapters in steps, one replica. `frame(now)` runs it until then and tells what happened."""

    adapters: list[str]
    max_rows: int = 16
    load: int = 20  # requests that run or wait
    replica: str = ""
    now: float = 0.0
    seed: int = 1
    step_seconds: float = 0.007  # and some more for each token
    rows: list[Row] = field(default_factory=list)
    moves: list[dict[str, Any]] = field(default_factory=list)
    slots: list[str] = field(default_factory=list)
    number: int = 0
    step_number: int = 0
    num_rows_made: int = 0
    preemptions: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def frame(self, now: float) -> dict[str, Any]:
        """One frame: the steps up to `now`."""
        steps, ended = [], []
        while self.now < now:
            self._arrive()
            step = self._step()
            ended += [row for row in self.rows if row.state == "finished"]
            self.rows = [row for row in self.rows if row.state != "finished"]
            steps += [step] if step else []
        self.number += 1
        return self._told(now, steps[-256:], ended)

    def _arrive(self) -> None:
        while len(self.rows) < self.load:
            adapter = self.random.choices(self.adapters, [1 / (at + 1) for at in range(len(self.adapters))])[0]
            self.num_rows_made += 1
            cold = adapter not in self.slots and "/" in adapter
            ready = self.now + (self.random.uniform(0.3, 1.2) if cold else 0)
            prompt = self.random.choice([24, 40, 60, 90, 300, 800])
            output = self.random.randint(20, 160)
            self.rows.append(Row(f"req-{self.num_rows_made:08x}", adapter, prompt, output, self.now, ready))
            if cold and len(self.slots) < 12:
                self.slots.append(adapter)
                digest = digest_of(adapter)
                for move in (("disk", "host"), ("host", "device")):
                    told = {"digest": digest, "name": adapter, "from": move[0], "to": move[1], "ms": 3.5}
                    self.moves.append(told)

    def _step(self) -> dict[str, Any] | None:
        self._admit()
        running = [row for row in self.rows if row.state == "running"]
        rows: list[tuple[str, str, int, int]] = []
        for row in running:
            if row.num_computed < row.num_prompt:
                tokens = min(CHUNK, row.num_prompt - row.num_computed)
                rows.append((row.id, "prefill", tokens, 0))
            else:
                drafted = row.adapter.endswith("sql") and self.random.random() < 0.4
                rows.append((row.id, "draft", 4, 3) if drafted else (row.id, "decode", 1, 1))
        seconds = self.step_seconds + sum(0.00008 * tokens for _, _, tokens, _ in rows)
        self.now += seconds
        if not rows:
            return None
        self.step_number += 1
        for row, (_, kind, tokens, _) in zip(running, rows, strict=True):
            self._advance(row, kind, tokens)
        head = {"replica": self.replica, "number": self.step_number, "time": self.now}
        return head | {"ms": seconds * 1000, "is_gap": False, "rows": rows}

    def _admit(self) -> None:
        num_running = sum(row.state == "running" for row in self.rows)
        for row in self.rows:
            if row.state == "preempted" and row.until < self.now:
                row.state = "running"
                num_running += 1
            if row.state in ("waiting", "loading"):
                row.state = "loading" if row.ready > self.now else "waiting"
                if row.state == "waiting" and num_running < self.max_rows:
                    row.state = "running"
                    num_running += 1

    def _advance(self, row: Row, kind: str, tokens: int) -> None:
        if kind == "prefill":
            row.num_computed += tokens
            if row.num_computed < row.num_prompt:
                return
        row.first_token_ms = row.first_token_ms or (self.now - row.arrived) * 1000
        row.num_output += 1 if kind != "draft" else 3
        if row.num_output >= row.max_output:
            row.state = "finished"
        elif self.random.random() < 0.0006:
            row.state, row.until = "preempted", self.now + 0.5
            self.preemptions += 1

    def _told(self, now: float, steps: list[dict[str, Any]], ended: list[Row]) -> dict[str, Any]:
        moves, self.moves = self.moves, []
        running = [row for row in self.rows if row.state == "running"]
        waiting = [row for row in self.rows if row.state in ("waiting", "loading")]
        queue: dict[str, dict[str, int]] = {}
        for row in self.rows:
            own = queue.setdefault(row.adapter.partition("/")[0], {"waiting": 0, "running": 0})
            own["running" if row.state == "running" else "waiting"] += 1
        slots = [
            {
                "replica": self.replica,
                "index": at + 1,
                "name": name,
                "digest": digest_of(name),
                "bytes": 900_000 + 1e5 * at,
            }
            | {"num_rows": sum(row.adapter == name for row in running), "pinned": at == 1, "version": 1, "also": []}
            for at, name in enumerate(self.slots)
        ]
        counts = {"hits": 90, "misses": 10, "loads": 12, "evictions": 2}
        sizes = {"device": 12e6, "host": 40e6, "disk": 300e6, "redis": 600e6}
        output = sum(row.num_output for row in running) % 90 + 700
        return {
            "time": now,
            "number": self.number,
            "steps": steps,
            "requests": [row.told(self.replica) for row in self.rows + ended],
            "num_waiting": len(waiting),
            "num_running": len(running),
            "queue": queue,
            "slots": slots,
            "max_loras": 16,
            "loading": [],
            "tiers": {
                name: {"bytes": size / 2.2, "budget": size, "items": 9 * (at + 1)} | counts
                for at, (name, size) in enumerate(sizes.items())
            },
            "moves": moves,
            "blocks": {"total": 2048, "free": 2048 - 40 * len(running), "cached": 400},
            "tokens_per_second": {"prompt": 420.0 + output / 9, "output": float(output)},
            "latency": {
                "first_token_ms": {"p50": 40.0 + output % 17, "p95": 150.0 + output % 43},
                "inter_token_ms": {"p50": 12.0 + output % 3, "p95": 21.0 + output % 7},
            },
            "limits": {"max_num_seqs": self.max_rows, "max_num_batched_tokens": 512, "window_ms": 0, "reason": ""},
            "preemptions": self.preemptions,
            "restarts": 0,
        }
