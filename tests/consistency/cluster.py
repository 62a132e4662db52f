"""Three servers on one Redis, each behind a network of its own that breaks in the ways that a seed draws."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lora_serve.commands.server_process import ServerProcess
from tests.broken_network import BrokenNetwork
from tests.consistency.judging import Cut
from tests.consistency.recording import ADMIN_KEY, Record, Replica, World
from tests.e2e.merged import save_sibling
from tests.oracle import save_adapter, save_tiny_model
from tests.redis_server import RedisServer
from tests.text.tiny_tokenizer import byte_level_tokenizer

NUM_REPLICAS, NUM_CONTENTS = 3, 4
STARTING = 300.0  # seconds that a server may take
ALL = frozenset(range(NUM_REPLICAS))


@dataclass
class Cluster:
    redis: RedisServer
    networks: Sequence[BrokenNetwork]
    servers: list[ServerProcess]
    contents: Sequence[Path]
    start_server: Callable[[int], None]
    cuts: list[Cut] = field(default_factory=list)

    def world(self) -> World:
        """With all contents known by their digests."""
        replicas = [Replica(number, server.url) for number, server in enumerate(self.servers)]
        digests = []
        for number, folder in enumerate(self.contents):
            status, card, _ = replicas[0].ask(
                "POST", "/admin/adapters", {"id": f"known/{number}", "source": str(folder)}
            )
            assert status == 201, card
            digests.append(card["digest"])
        return World(replicas, self.contents, digests)

    @contextmanager
    def cut(self, *replicas: int) -> Iterator[None]:
        """Notes the time within as one during which these did not reach Redis."""
        start = time.monotonic()
        yield
        self.cuts.append(Cut(frozenset(replicas), start, time.monotonic()))


@contextmanager
def running(root: Path, append_only: bool = True) -> Iterator[Cluster]:
    """A cluster whose servers are ready. A Redis without `append_only` keeps what its last snapshot has."""
    tokenizer = byte_level_tokenizer()
    model = save_tiny_model("llama", root / "model", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(model)
    template = save_adapter(model, root / "adapters" / "template", seed=1, std=0.2, r=4)
    contents = [save_sibling(template, root / "adapters" / str(seed), seed) for seed in range(NUM_CONTENTS)]
    (root / "redis").mkdir()
    redis = RedisServer(root / "redis", append_only=append_only)
    redis.start()
    with ExitStack() as stack:
        stack.callback(redis.stop)
        networks = [stack.enter_context(BrokenNetwork(redis.port)) for _ in ALL]
        servers = [
            ServerProcess(_arguments(root, model, number, network.port), root / f"server-{number}.log")
            for number, network in enumerate(networks)
        ]

        def start_server(number: int) -> None:
            servers[number].__enter__()
            servers[number].wait_until_ready(STARTING)

        for server in servers:
            stack.enter_context(server)
        for server in servers:
            server.wait_until_ready(STARTING)
        yield Cluster(redis, networks, servers, contents, start_server)


def _arguments(root: Path, model: Path, number: int, port: int) -> list[str]:
    return [
        "--model", str(model), "--served-model-name", "tiny", "--admin-key", ADMIN_KEY, "--auth", "on",
        "--store", str(root / f"store-{number}"), "--adapter-root", str(root / "adapters"),
        "--redis-url", f"redis://127.0.0.1:{port}/0", "--max-model-len", "64", "--kv-cache-memory", "2MiB",
        "--max-loras", "8", "--warmup", "off", "--wrong-keys-per-minute", "1000000",
        "--admin-acts-per-minute", "1000000",
    ]  # fmt: skip


class Breaking:
    """Breaks networks, Redis and servers, one after the other, each mended before the next."""

    def __init__(self, cluster: Cluster, seed: int, kills_servers: bool = False) -> None:
        self._cluster, self._draw = cluster, random.Random(f"{seed}-breaking")
        self.done: list[str] = []
        self._next: list[Callable[[], None]] = []
        self._ways: list[Callable[[], None]] = [
            self._cut_some,
            self._silence_some,
            self._lose_answers,
            self._end_connections,
            self._kill_redis,
            self._restart_redis,
        ] + ([self._kill_server] if kills_servers else [])

    def run(self, rounds: int, between: float = 2.0) -> None:
        """Every way once before any comes twice."""
        for _ in range(rounds):
            if not self._next:
                self._next = self._draw.sample(self._ways, len(self._ways))
            way = self._next.pop()
            way()
            self.done.append(way.__name__.strip("_"))
            time.sleep(between)

    def _some(self) -> list[int]:
        return self._draw.sample(sorted(ALL), self._draw.choice([1, 1, 2]))

    def _cut_some(self) -> None:
        chosen = self._some()
        with self._cluster.cut(*chosen):
            for number in chosen:
                self._cluster.networks[number].cut()
            time.sleep(self._draw.uniform(0.2, 4))
            for number in chosen:
                self._cluster.networks[number].mend()

    def _silence_some(self) -> None:
        chosen = self._some()
        with self._cluster.cut(*chosen):
            for number in chosen:
                self._cluster.networks[number].fall_silent()
            time.sleep(self._draw.uniform(0.2, 5))
            for number in chosen:
                self._cluster.networks[number].mend()

    def _lose_answers(self) -> None:
        """Redis does what it was asked, and nobody hears of it."""
        with self._cluster.cut(*ALL):
            for _ in range(6):
                for network in self._cluster.networks:
                    network.lose_answer_to(b"EXEC")
                time.sleep(0.5)
            for network in self._cluster.networks:
                network.lose_answer_to(b"")

    def _end_connections(self) -> None:
        with self._cluster.cut(*ALL):
            for _ in range(10):
                self._draw.choice(self._cluster.networks).end_connections()
                time.sleep(0.2)

    def _kill_redis(self) -> None:
        with self._cluster.cut(*ALL):
            self._cluster.redis.kill()
            time.sleep(self._draw.uniform(0, 3))
            self._cluster.redis.start()

    def _restart_redis(self) -> None:
        with self._cluster.cut(*ALL):
            self._cluster.redis.shut_down()
            self._cluster.redis.start()

    def _kill_server(self) -> None:
        number = self._draw.choice(sorted(ALL))
        with self._cluster.cut(number):
            server = self._cluster.servers[number]
            server.stop(0)
            self._cluster.start_server(number)


def look_at_the_end(world: World, objects: Sequence[tuple[str, str]]) -> None:
    """Asks every replica for everything, once all is mended."""
    for kind, name in objects:
        for replica in world.replicas:
            acts = {"adapter": [("show",), ("serve",)], "alias": [("serve",)]}.get(
                kind, [("knock", key) for key, (tenant, _) in world.secrets.items() if tenant == name]
            )
            for act in acts:
                assert world.do(kind, name, act, replica), (kind, name, act)


def figures(record: Record, done: Sequence[str]) -> dict[str, object]:
    """Of a report."""
    acts = [one for one in record.observed if one.act[0] not in ("show", "serve", "knock")]
    unknown = sum(one.status in (0, 503) for one in acts)
    return {
        "operations": len(record.observed),
        "changes": sum(200 <= one.status < 300 for one in acts),
        "unknown": unknown,
        "breaks": len(done),
        "statuses": {str(status): count for status, count in sorted(record.statuses.items())},
    }
