"""The process client when its child crashes, hangs, refuses, or loses its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lora_serve.client.process import EngineProcess, ProcessEngineClient, configure_of
from lora_serve.core.errors import EngineLostError, ModelError, NotReadyError
from lora_serve.core.messages import Evict, Pin, Resize, TokenEvent, Tune, Unpin
from lora_serve.core.settings import Settings
from tests.engine.fake_runner import next_token
from tests.engine.world import adapter
from tests.engine_host import fake_engine
from tests.engine_host.engine_clients import process_client, request
from tests.engine_host.fake_engine import BUG, CRASH, EXIT, FATAL, HANG, SLOW, UNSPEAKABLE

NOTICED = 2.0  # seconds within which a child's death is known
PATIENCE = 60.0


@pytest.fixture
async def client() -> AsyncIterator[ProcessEngineClient]:
    async with process_client() as found:
        await found.start()
        yield found


async def tokens_of(client: ProcessEngineClient, asked: Any) -> list[int]:
    return [event.token_id async for event in client.infer(asked) if isinstance(event, TokenEvent)]


async def running(client: ProcessEngineClient, name: str = "running") -> asyncio.Task[list[int]]:
    """A request that goes on for a while."""
    task = asyncio.create_task(tokens_of(client, request(name, max_tokens=190, prompt=[SLOW])))
    while (await client.stats()).num_running == 0:
        pass
    return task


def state_of(pid: int | None) -> str:
    """One letter, see proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def is_alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return state_of(pid) != "Z"
    except FileNotFoundError:
        return False


async def test_a_killed_engine_is_noticed_at_once_and_its_requests_are_told(client: ProcessEngineClient) -> None:
    rows = [await running(client, f"r{index}") for index in range(3)]
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    killed = time.monotonic()
    reason = await client.lost()
    for row in rows:
        with pytest.raises(EngineLostError, match="being restarted") as caught:
            await row
        assert caught.value.retry_after > 0
    assert time.monotonic() - killed < NOTICED
    assert "SIGKILL" in reason
    assert client.gate.num_requests == 0


@pytest.mark.many(2)
@pytest.mark.parametrize(
    ("token", "words"), [(CRASH, "SIGSEGV"), (EXIT, "code 7"), (FATAL, "code 1"), (UNSPEAKABLE, "code 1")]
)
async def test_an_engine_that_ends_by_itself_ends_what_ran(
    client: ProcessEngineClient, token: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(EngineLostError):
        async with asyncio.timeout(PATIENCE):
            await tokens_of(client, request("r", prompt=[token]))
    assert words in caplog.text
    with pytest.raises(NotReadyError, match="being started"):
        await client.stats()
    await client.start()
    assert await tokens_of(client, request("s", max_tokens=1)) == [next_token(None, [1, 2])]


async def test_an_engine_that_is_told_nonsense_ends(client: ProcessEngineClient) -> None:
    assert client._process is not None
    client._process._connection.send(b"\0\0\0\1x")
    async with asyncio.timeout(PATIENCE):
        assert "code 1" in await client.lost()


async def test_commands_in_the_air_are_told(client: ProcessEngineClient) -> None:
    pin = asyncio.create_task(client.adapters(Pin(adapter("slow"))))
    while not (await client.stats()).loading_digests:
        pass
    client.kill("a test")
    with pytest.raises(EngineLostError):
        await pin
    assert await client.lost() == "it is not there"


async def test_the_next_engine_is_told_what_the_last_one_was(client: ProcessEngineClient) -> None:
    await client.adapters(Resize(max_loras=3))
    await client.adapters(Tune(max_num_seqs=3))
    for name in ("pinned", "gone"):
        await client.adapters(Pin(adapter(name)))
    await client.adapters(Evict("sha256:nobody"))
    await tokens_of(client, request("r", adapter("used")))
    first = client.pid
    client.kill("a test")
    await client.lost()
    await client.start()
    stats = await client.stats()
    assert client.pid != first
    assert stats.max_loras == 3
    assert stats.batcher is not None
    assert stats.batcher.limits.max_num_seqs == 3
    assert {(slot.digest, slot.pinned) for slot in stats.slots} == {
        ("sha256:pinned", True), ("sha256:gone", True), ("sha256:used", False),
    }  # fmt: skip


async def test_what_leaves_while_there_is_no_engine_does_not_come_back(client: ProcessEngineClient) -> None:
    await client.adapters(Pin(adapter("unpinned")))
    await tokens_of(client, request("r", adapter("deleted")))
    client.kill("a test")
    await client.lost()
    for command in (Unpin("sha256:unpinned"), Evict("sha256:deleted", forget=True)):
        with pytest.raises(NotReadyError):
            await client.adapters(command)
    await client.start()
    assert (await client.stats()).slots == ()


async def test_an_engine_that_cannot_be_started_again_at_present_is_started_later(client: ProcessEngineClient) -> None:
    """No processes, no descriptors, or no memory for the model: it was served before, so it is no mistake of anyone."""
    spawn, refused = client._spawn, configure_of(Settings(model=fake_engine.REFUSED))

    async def no_process() -> EngineProcess:
        return await EngineProcess.start(("/nowhere",), refused)

    async def no_memory() -> EngineProcess:
        return await EngineProcess.start(fake_engine.COMMAND, refused)

    client.kill("a test")
    await client.lost()
    num_descriptors = len(os.listdir("/proc/self/fd"))
    for client._spawn in (no_process, no_memory):
        with pytest.raises(EngineLostError, match="cannot be started at present"):
            await client.start()
        assert len(os.listdir("/proc/self/fd")) == num_descriptors
    client._spawn = spawn
    await client.start()
    await client.ping()


async def test_an_engine_that_hangs_before_it_was_told_its_orders_is_left_to_the_watchdog(
    client: ProcessEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.adapters(Resize(max_loras=3))
    client.kill("a test")
    await client.lost()
    monkeypatch.setattr("lora_serve.client.process.RELOAD_SECONDS", 0.01)
    load = client.load

    async def load_and_hang() -> Any:
        spec = await load()
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)
        return spec

    monkeypatch.setattr(client, "load", load_and_hang)
    async with asyncio.timeout(PATIENCE):
        await client.start()
    client.kill("it hangs")
    await client.lost()


async def test_a_bug_of_the_engine_ends_its_requests_and_not_the_process(client: ProcessEngineClient) -> None:
    await client.adapters(Pin(adapter("a")))
    other = await running(client)
    before = client.pid
    with pytest.raises(Exception, match="engine failed"):
        await tokens_of(client, request("r", prompt=[BUG]))
    with pytest.raises(Exception, match="engine failed"):
        await other
    assert await tokens_of(client, request("s", adapter("a"), max_tokens=1)) == [next_token("sha256:a", [1, 2])]
    stats = await client.stats()
    assert client.pid == before
    assert stats.num_free_blocks == stats.num_blocks
    assert [(slot.digest, slot.pinned) for slot in stats.slots] == [("sha256:a", True)]


async def test_a_hung_engine_does_not_answer_a_ping_and_can_be_killed(client: ProcessEngineClient) -> None:
    await client.ping()
    stuck = asyncio.create_task(tokens_of(client, request("r", prompt=[HANG])))
    async with asyncio.timeout(PATIENCE):
        while state_of(client.pid) != "T":  # stopped
            await asyncio.sleep(0.01)
    ping = asyncio.create_task(client.ping())
    assert not (await asyncio.wait({ping}, timeout=0.2))[0]
    client.kill("it hangs")
    for task in (stuck, ping):
        with pytest.raises(EngineLostError):
            await task
    await client.start()
    await client.ping()


async def test_whoever_waits_for_an_engine_that_is_killed_is_told_though_its_end_takes_a_while(
    client: ProcessEngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = await running(client)
    assert client._process is not None
    child = client._process._child
    with monkeypatch.context() as patched:
        patched.setattr(child, "kill", lambda: None)  # it waits for a device
        client.kill("it hangs")
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(EngineLostError, match="being restarted"):
                await row
        assert is_alive(child.pid)
        with pytest.raises(NotReadyError, match="being started"):
            await client.stats()
    child.kill()
    await client.lost()
    await client.start()
    assert await tokens_of(client, request("s", max_tokens=1)) == [next_token(None, [1, 2])]


async def test_an_engine_that_is_being_loaded_again_can_be_killed(client: ProcessEngineClient) -> None:
    client.kill("a test")
    await client.lost()
    starting = asyncio.create_task(client.start())
    async with asyncio.timeout(PATIENCE):
        while client.pid is None:
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # it is waited for
        client.kill("it is not loaded")
        with pytest.raises(EngineLostError, match="it is not loaded"):
            await starting
    await client.start()
    await client.ping()


async def test_a_refused_model_is_the_callers_error() -> None:
    async with process_client(model=fake_engine.REFUSED) as client:
        with pytest.raises(ModelError, match="a picture"):
            await client.load()


async def test_a_child_that_says_nothing_is_lost() -> None:
    async with process_client(command=(sys.executable, "-c", "raise SystemExit(4)")) as client:
        with pytest.raises(EngineLostError, match="exited with code 4"):
            await client.load()


async def test_a_child_that_says_nonsense_is_ended() -> None:
    speak = "s = socket.socket(fileno=int(sys.argv[1])); s.sendall(b'\\0\\0\\0\\1x')"
    waiting = f"import socket, sys, threading; {speak}; threading.Event().wait()"
    async with process_client(command=(sys.executable, "-c", waiting)) as client:
        with pytest.raises(EngineLostError):
            async with asyncio.timeout(PATIENCE):
                await client.load()


async def test_the_child_gets_no_setting_of_the_environment_but_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_SERVE_ADMIN_KEY", "a long enough secret")
    monkeypatch.setenv("LORA_SERVE_KERNELS", "generic")
    async with process_client(admin_key="a long enough secret", redis_url="redis://:password@host/0") as client:
        await client.start()
        environment = Path(f"/proc/{client.pid}/environ").read_bytes()
        arguments = Path(f"/proc/{client.pid}/cmdline").read_bytes()
    assert b"secret" not in environment + arguments
    assert b"LORA_SERVE_KERNELS=generic\0" in environment
    assert b"password" not in environment + arguments


async def test_stop_ends_the_child_and_leaves_no_zombie(client: ProcessEngineClient) -> None:
    pid = client.pid
    assert pid is not None
    await client.stop()
    assert not Path(f"/proc/{pid}").exists()


PARENT = """
import asyncio, sys
sys.path.insert(0, {root!r})
from tests.engine_host.engine_clients import process_client

async def main():
    async with process_client() as client:
        await client.start()
        print(client.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_child_ends_with_its_parent(number: signal.Signals) -> None:
    root = str(Path(__file__).resolve().parents[2])
    parent = subprocess.Popen([sys.executable, "-c", PARENT.format(root=root)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout as said:
        child = int(said.readline())
    assert is_alive(child)
    parent.send_signal(number)
    parent.wait()
    deadline = time.monotonic() + PATIENCE
    while is_alive(child):
        assert time.monotonic() < deadline, "the child outlives its parent"
