"""The way of frames past Ray Serve, over real sockets: who is let in, and how either end's end is known."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import trustme

from lora_serve.client import wire as ends
from lora_serve.client.wire import FrameStream, ReplicaAddress, head_of
from lora_serve.core.messages import FromEngine
from lora_serve.engine_host.fleet import gateways
from lora_serve.engine_host.fleet.gateways import Entrance, FrameSink, Gateways

HOST = "127.0.0.1"
PATIENCE = 5.0
NAME = head_of(b"g") + b"g"


class Replica(Gateways):
    """Notes what its gateway says, and speaks to it by `sink`."""

    sink: FrameSink

    def __init__(self) -> None:
        super().__init__(print, print)
        self.entrance = Entrance(HOST, self, list)
        self.names: list[str] = []
        self.arrived = asyncio.Event()
        self.detached = asyncio.Event()
        self.flushed = asyncio.Event()
        self.taken: asyncio.Queue[bytes] = asyncio.Queue()

    def attach(self, gateway: str, sink: FrameSink, greeting: Sequence[FromEngine]) -> None:
        self.sink = sink
        self.names.append(gateway)
        self.arrived.set()

    def take(self, gateway: str, frame: bytes) -> None:
        self.taken.put_nowait(frame)

    def flush(self, gateway: str) -> None:
        self.flushed.set()

    def detach(self, gateway: str) -> None:
        self.detached.set()

    async def entered(self, gateway: str = "g") -> FrameStream:
        stream = await FrameStream.open(self.entrance.place, gateway)
        await self.arrived.wait()
        return stream


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    made = Replica()
    await made.entrance.open(None)
    async with asyncio.timeout(PATIENCE):
        yield made
    made.entrance.close()


async def test_frames_cross_both_ways_in_order(replica: Replica) -> None:
    stream = await replica.entered()
    frames = stream.frames()
    for body in (b"a", b"", b"c" * 300_000):
        replica.sink.send(body)
        stream.send(body.upper())
    assert [await anext(frames) for _ in range(3)] == [b"a", b"", b"c" * 300_000]
    assert [await replica.taken.get() for _ in range(3)] == [b"A", b"", b"C" * 300_000]
    stream.close()


async def test_gateway_that_is_gone_is_detached_and_leaves_the_entrance_empty(replica: Replica) -> None:
    stream = await replica.entered()
    emptied = asyncio.create_task(replica.entrance.emptied())
    await asyncio.sleep(0.05)
    assert not emptied.done()
    assert not replica.detached.is_set()
    stream.close()
    await emptied
    assert replica.detached.is_set()


async def test_entrance_is_empty_once_the_last_has_left(replica: Replica) -> None:
    first, second = await replica.entered("a"), await replica.entered("b")
    while replica.names != ["a", "b"]:
        await asyncio.sleep(0.01)
    first.close()
    await replica.detached.wait()
    emptied = asyncio.create_task(replica.entrance.emptied())
    await asyncio.sleep(0.05)
    assert not emptied.done()
    second.close()
    await emptied


async def test_end_of_the_replicas_connection_ends_the_gateways_frames(replica: Replica) -> None:
    stream = await replica.entered()
    replica.sink.send(b"a")
    frames = stream.frames()
    assert await anext(frames) == b"a"
    replica.sink.close()
    assert [frame async for frame in frames] == []
    await replica.detached.wait()


async def test_gateway_comes_again_with_the_same_ticket_and_another_name(replica: Replica) -> None:
    (await replica.entered("g.1")).close()
    await replica.detached.wait()
    stream = await replica.entered("g.2")
    stream.send(b"a")
    assert await replica.taken.get() == b"a"
    stream.close()


async def test_name_that_is_inside_already_is_thrown_out(replica: Replica) -> None:
    stream = await replica.entered()
    assert await thrown_out(replica.entrance.place, replica.entrance.place.ticket + NAME)
    stream.send(b"a")
    assert await replica.taken.get() == b"a"
    assert not replica.detached.is_set()
    stream.close()


async def test_strangers_are_thrown_out(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateways, "ARRIVAL_SECONDS", 0.2)
    place = replica.entrance.place
    assert await thrown_out(place, bytes(ends.TICKET_BYTES) + NAME)
    assert await thrown_out(place, place.ticket[:-1])  # says no more, and not all
    assert await thrown_out(place, place.ticket + NAME[:-1])
    assert await thrown_out(place, place.ticket + head_of(b"\xff") + b"\xff")
    assert await thrown_out(place, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + bytes(99))
    assert not replica.arrived.is_set()
    stream = await replica.entered()
    await asyncio.sleep(0.3)
    stream.send(b"a")  # who is no stranger stays
    assert await replica.taken.get() == b"a"
    stream.close()


async def thrown_out(place: ReplicaAddress, words: bytes) -> bool:
    """Whether whoever says this is told nothing, and hung up on."""
    reader, writer = await asyncio.open_connection(place.host, place.port)
    writer.write(words)
    try:
        return await asyncio.wait_for(reader.read(1), PATIENCE) == b""
    except ConnectionResetError:
        return True
    finally:
        writer.close()


async def test_there_is_no_room_for_a_gateway_that_does_not_read_until_it_does(replica: Replica) -> None:
    place = replica.entrance.place
    with socket.create_connection((place.host, place.port)) as gateway:
        gateway.sendall(place.ticket + NAME)
        await replica.arrived.wait()
        num_sent = 0
        while replica.sink.can_write:
            replica.sink.send(bytes(2**20))
            num_sent += 1
            await asyncio.sleep(0)
        assert num_sent < 100
        assert not replica.flushed.is_set()
        left = num_sent * (2**20 + 4)
        while left:
            left -= len(await asyncio.to_thread(gateway.recv, 2**20))
        await replica.flushed.wait()
        assert replica.sink.can_write


@pytest.fixture
def certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> trustme.CA:
    """As Ray's variables name them."""
    authority = trustme.CA()
    own = authority.issue_cert(HOST)
    authority.cert_pem.write_to_path(tmp_path / "ca")
    own.private_key_pem.write_to_path(tmp_path / "key")
    own.cert_chain_pems[0].write_to_path(tmp_path / "cert")
    monkeypatch.setenv("RAY_USE_TLS", "1")
    for name, file in (("CA_CERT", "ca"), ("SERVER_CERT", "cert"), ("SERVER_KEY", "key")):
        monkeypatch.setenv(f"RAY_TLS_{name}", str(tmp_path / file))
    return authority


async def test_with_rays_tls_both_ends_show_certificates(
    certificates: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica()
    await replica.entrance.open(ends.tls(ssl.Purpose.CLIENT_AUTH))
    place = replica.entrance.place
    async with asyncio.timeout(PATIENCE):
        assert await thrown_out(place, place.ticket + NAME)  # not encrypted
        nameless = ssl.create_default_context()
        certificates.configure_trust(nameless)
        assert await refused(place, nameless)
        stranger = ssl.create_default_context()
        certificates.configure_trust(stranger)
        trustme.CA().issue_cert(HOST).configure_cert(stranger)
        assert await refused(place, stranger)
        assert not replica.arrived.is_set()
        stream = await replica.entered()
        replica.sink.send(b"a")
        assert await anext(stream.frames()) == b"a"
        stream.send(b"b")
        assert await replica.taken.get() == b"b"
        stream.close()
        monkeypatch.setenv("RAY_TLS_CA_CERT", str(Path(__file__).parent / "none"))
        with pytest.raises(OSError, match="No such file"):
            await FrameStream.open(place, "g")
    replica.entrance.close()


async def refused(place: ReplicaAddress, context: ssl.SSLContext) -> bool:
    """Whether who shows this certificate, or none, gets no further."""
    reader, writer = await asyncio.open_connection(place.host, place.port, ssl=context)
    try:
        writer.write(place.ticket + NAME)
        return await reader.read(1) == b""
    except (ssl.SSLError, ConnectionError):
        return True
    finally:
        writer.transport.abort()
