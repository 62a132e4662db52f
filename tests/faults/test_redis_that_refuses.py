"""What an operator reads while Redis is there and says no: its own words, until it takes changes again."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.canary.asking import Canaries
from tests.canary.house import ADMIN, House, running, settings_of
from tests.canary.questions import World
from tests.canary.watch import watching
from tests.faults.injecting import settle
from tests.hostile.adapter_files import files_of, tar
from tests.hostile.sending import call
from tests.oracle import save_adapter
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.nightly, pytest.mark.engines("thread")]
FILLER = 400  # keys of 1 KiB, each of which takes 20 ms to load


def own_address() -> str:
    """An address of this machine that is not loopback's, from which a Redis in protected mode takes nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # nothing is sent
        return str(probe.getsockname()[0])


def ready(house: House) -> dict[str, Any]:
    return dict(call(house, "GET", "/ready", b"", dict(ADMIN)).json)


def protect(server: RedisServer) -> None:
    with server.client() as client:
        client.config_set("protected-mode", "yes")
        client.client_kill_filter(_type="normal", skipme=True)


def unprotect(server: RedisServer) -> None:
    with server.client() as client:
        client.config_set("protected-mode", "no")


def forbid(server: RedisServer) -> None:
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "-hgetall", "-xread")


def allow(server: RedisServer) -> None:
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "+@all")


def rename(server: RedisServer) -> None:
    restart(server, "--rename-command", "HGETALL", "hidden")


def load_slowly(server: RedisServer) -> None:
    with server.client() as client:
        client.mset({f"filler:{number}": "x" * 1024 for number in range(FILLER)})
        client.bgrewriteaof()
        settle(lambda: client.info("persistence")["aof_rewrite_in_progress"] == 0)
    server._wait = lambda: None  # type: ignore[method-assign]
    restart(server, "--key-load-delay", "20000", "--loading-process-events-interval-bytes", "1024")
    del server._wait


def restart(server: RedisServer, *more: str) -> None:
    server.kill()
    server._more = ("--bind", "0.0.0.0", "--protected-mode", "no", *more)
    server.start()


def is_loaded(server: RedisServer) -> None:
    def pings() -> bool:
        try:
            with server.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    settle(pings)


REFUSALS: dict[str, tuple[Callable[[RedisServer], None], Callable[[RedisServer], None], str]] = {
    "protected": (protect, unprotect, "is in protected mode: give it a password, or bind it to an address of its own"),
    "acl": (forbid, allow, "does not let the user of --redis-url do this: widen its ACL (NOPERM)"),
    "renamed": (rename, restart, "answers: unknown command 'HGETALL'"),
    "loading": (load_slowly, is_loaded, "is loading its data set: it answers once it has (LOADING)"),
}


def test_refusals_of_redis_are_told_by_ready_and_by_registrations(
    world: World, canaries: Canaries, tmp_path: Path, own_redis: RedisServer
) -> None:
    folder = save_adapter(world.model, tmp_path / "victim", seed=77, std=0.2, r=4)
    restart(own_redis)
    url = own_redis.url.replace("127.0.0.1", own_address())
    with running(settings_of(world, tmp_path / "store", redis_url=url, max_loras=16)) as house:
        for name, (refuse, mend, words) in REFUSALS.items():
            with watching(house, canaries, pause=0.2) as watch:
                watch.expected_in_log = ["Redis"]
                refuse(own_redis)
                settle(lambda words=words: words in ready(house).get("reason", ""))  # type: ignore[misc]
                told = ready(house)
                assert (told["status"], told["read_only"]) == ("ready", True), "what is known is served"
                assert told["reason"].startswith("The shared adapter registry in Redis ")
                refused = call(house, "PUT", f"/admin/adapters/new/{name}", tar(files_of(folder)), dict(ADMIN))
                assert (refused.status, "Retry-After" in refused.headers) == (503, True)
                assert words in refused.json["error"]["message"]
                mend(own_redis)
                settle(lambda: ready(house) == {"status": "ready"})
            made = call(house, "PUT", f"/admin/adapters/new/{name}", tar(files_of(folder)), dict(ADMIN))
            assert made.status == 201, made.body
            away = [line for line in house.log if "the shared adapter registry is away" in line and words in line]
            assert len(away) == 1, "it is told once"
