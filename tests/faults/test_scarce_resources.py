"""A server, or its engine, that is left few descriptors or little memory by the kernel itself: no answer is wrong,
and all is as before once there is enough again.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from lora_serve.commands.server_process import ServerProcess
from tests.canary.asking import Canaries
from tests.canary.house import ADMIN
from tests.canary.questions import World
from tests.e2e.plain_http import Reply, call
from tests.e2e.processes import eventually, is_alive
from tests.engine_choice import EngineHost
from tests.faults.outside import arguments, ask_all, asking, engines_of, pause, probe
from tests.oracle import save_adapter

pytestmark = [
    pytest.mark.nightly,  # by day: tests/faults/test_engine_faults.py, tests/server/sockets
    pytest.mark.timeout(600),
    pytest.mark.engines("thread", nightly=["process"]),
]
MIB = 2**20
SPARE = 6  # descriptors


@pytest.fixture(scope="module")
def server(engine_host: EngineHost, world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("scarce")
    flags = [*arguments(world, folder / "store", is_first=True), "--max-loras", "2"]
    with engine_host.serving(flags, folder / "log") as process:
        yield process


@pytest.fixture(scope="module")
def folder(world: World) -> Path:
    return save_adapter(world.model, world.root / "adapters" / "victim", seed=77, std=0.2, r=4)


@contextmanager
def limited(pids: list[int], what: int, limits: list[int]) -> Iterator[None]:
    """The kernel's limits of processes, as they were afterwards."""
    before = [resource.prlimit(pid, what) for pid in pids]
    for pid, limit, (_, hard) in zip(pids, limits, before, strict=True):
        resource.prlimit(pid, what, (limit, hard))
    try:
        yield
    finally:
        for pid, limits_before in zip(pids, before, strict=True):
            with suppress(ProcessLookupError):
                resource.prlimit(pid, what, limits_before)


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_server_without_descriptors_takes_nobody_in_and_loses_nobody_inside(
    server: ServerProcess, canaries: Canaries, folder: Path
) -> None:
    """Idle connections take all there are; as they leave, everybody is answered."""
    with asking(server, canaries, may_refuse=True):
        pause(0.5)
        limit = num_descriptors(server.pid) + SPARE
        with limited([server.pid], resource.RLIMIT_NOFILE, [limit]), ExitStack() as idle:
            for _ in range(4 * SPARE):
                idle.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            assert probe(server, "/health") is None, "there were descriptors left"
            pause(2)
            assert server.exit_code is None
        eventually(lambda: probe(server, "/ready") == 200, "it does not go on")
        body = {"id": "descriptors/x", "source": str(folder)}
        assert call(f"{server.url}/admin/adapters", body, ADMIN).status == 201
    ask_all(server, canaries)
    assert server.log.read_text().count("Traceback") == 0


@pytest.mark.engines("process", also=["ray"], alone="the server has enough")
def test_engine_without_descriptors_refuses_what_it_must_load_and_loads_it_again(
    server: ServerProcess, canaries: Canaries, engine_host: EngineHost
) -> None:
    engines = engines_of(server, engine_host)
    with asking(server, canaries, may_refuse=True):
        pause(0.5)
        with limited(engines, resource.RLIMIT_NOFILE, [3 for _ in engines]):
            for name in ("acme/a", "globex/b"):
                assert call(f"{server.url}/admin/adapters/{name}/evict", {}, ADMIN).status == 200
            replies = [answer(server, "acme/a") for _ in range(4)]
            assert {reply.status for reply in replies} == {503}
            assert all("Retry-After" in reply.headers and "/store" not in reply.text for reply in replies)
        eventually(lambda: answer(server, "acme/a").status == 200, "it is not loaded again")
    assert engines_of(server, engine_host) == engines
    ask_all(server, canaries)


def answer(process: ServerProcess, model: str) -> Reply:
    return call(f"{process.url}/v1/completions", {"model": model, "prompt": "x", "max_tokens": 2})


@pytest.mark.engines("process", also=["ray"], alone="asyncio resets a connection that it has no memory to read")
def test_engine_without_memory_to_take_answers_right_or_not_at_all(
    server: ServerProcess, canaries: Canaries, engine_host: EngineHost, folder: Path
) -> None:
    """Not a byte of address space more than it has; it may even end, where it can be replaced."""
    engines = engines_of(server, engine_host)
    with asking(server, canaries, may_refuse=True):
        pause(0.5)
        with limited(engines, resource.RLIMIT_AS, [_num_bytes(pid) + MIB for pid in engines]):
            for number in range(3):
                body = {"id": f"memory/{number}", "source": str(folder)}
                assert call(f"{server.url}/admin/adapters", body, ADMIN).status in (200, 201, 503)
                pause(1)
        eventually(lambda: is_whole(server, engine_host), "it does not go on")
    assert server.exit_code is None
    ask_all(server, canaries)


LONG_CHAT = {"messages": [{"role": "user", "content": "x " * 60_000}], "max_tokens": 2}  # tokenised on a thread


def test_server_without_address_space_refuses_in_words_and_ends_well(
    engine_host: EngineHost, world: World, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with engine_host.serving(arguments(world, tmp_path / "store", is_first=True), log) as process:
        assert answer(process, "acme/a").status == 200
        # Less than a thread's stack, and more than asyncio reads at a time: it resets what it cannot read.
        with limited([process.pid], resource.RLIMIT_AS, [_num_bytes(process.pid) + 4 * MIB]):
            with ThreadPoolExecutor(12) as crowd:
                asked = [crowd.submit(call, f"{process.url}/v1/chat/completions", LONG_CHAT) for _ in range(12)]
                assert {reply.result().status for reply in asked} <= {400, 503}
            os.kill(process.pid, signal.SIGTERM)
            eventually(lambda: process.exit_code is not None, "it does not end")
        assert process.exit_code == 0
    assert log.read_text().count("Traceback") == 0


def is_whole(process: ServerProcess, host: EngineHost) -> bool:
    return len(engines_of(process, host)) == host.num_engines and probe(process, "/ready") == 200


MEMORY = Path("/sys/fs/cgroup/memory")  # of the first version
LIMIT = "memory.limit_in_bytes"


@contextmanager
def memory_group(pid: int) -> Iterator[Path]:
    """A group of its own for a process, as the kernel sees them; what it starts later is in it, too."""
    group = MEMORY / f"lora-serve-tests-{pid}"
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(pid))
        yield group
    finally:
        for one in (group / "cgroup.procs").read_text().split():
            (MEMORY / "cgroup.procs").write_text(one)
        eventually(lambda: not (group / "cgroup.procs").read_text(), "the group is in use")
        group.rmdir()


@pytest.mark.engines("process", also=["ray"], alone="it has a process for the kernel to end")
def test_engine_that_the_kernel_ends_for_want_of_memory_is_replaced(
    server: ServerProcess, canaries: Canaries, engine_host: EngineHost
) -> None:
    """By its control group: needs to be root, and the first version of them."""
    eventually(lambda: is_whole(server, engine_host), "an engine is missing")
    old = engines_of(server, engine_host)
    with asking(server, canaries, may_refuse=engine_host.num_engines == 1):
        pause(0.5)
        with memory_group(old[0]) as group:
            with suppress(OSError):  # it cannot be made to fit: from now on it gets no more
                (group / LIMIT).write_text(str(64 * 2**10))
            eventually(lambda: not is_alive(old[0]), "it lives without new memory")
        eventually(lambda: old[0] not in engines_of(server, engine_host), "the engine is still there")
        eventually(lambda: is_whole(server, engine_host), "there is no other engine")
    ask_all(server, canaries)


def _num_bytes(pid: int) -> int:
    """Of its address space."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
