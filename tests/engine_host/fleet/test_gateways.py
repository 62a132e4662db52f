"""Who gets which of a replica's messages."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lora_serve.client.wire import body_of, from_engine
from lora_serve.core.blob_messages import BlobFolder, CloseBlob, OpenBlob
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.messages import (
    Abort,
    FinishEvent,
    FromEngine,
    GetStats,
    Ping,
    Ready,
    Reply,
    Submit,
    ToEngine,
    TokenEvent,
)
from lora_serve.core.request import FinishReason
from lora_serve.engine_host.fleet.gateways import OWN, Gateways
from tests.client.ray.fake_fleet import Sink
from tests.engine_host.engine_clients import request
from tests.engine_host.fake_engine import fake_spec


class Replica:
    """Notes what its engine gets."""

    def __init__(self) -> None:
        self.taken: list[ToEngine] = []
        self.answered: list[Reply] = []
        self.own: list[FromEngine] = []
        self.gateways = Gateways(self.taken.append, self.answered.append, self.own.append)

    async def attach(self, name: str) -> Sink:
        sink = Sink()
        self.gateways.attach(name, sink, [Ready(fake_spec())])
        assert from_engine(await sink.frames.get()) == [Ready(fake_spec())]
        return sink


async def test_each_gateway_gets_its_own_events_and_all_of_a_step_in_one_frame() -> None:
    replica = Replica()
    first, second = await replica.attach("g"), await replica.attach("h")
    for gateway, name in (("g", "a"), ("g", "b"), ("h", "c")):
        replica.gateways.take(gateway, body_of([Submit(request(name))]))
    replica.gateways.send([TokenEvent(name, 5, None) for name in "abc"])
    assert from_engine(await first.frames.get()) == [TokenEvent("a", 5, None), TokenEvent("b", 5, None)]
    assert from_engine(await second.frames.get()) == [TokenEvent("c", 5, None)]
    replica.gateways.send([FinishEvent("a", FinishReason.STOP), FinishEvent("unknown", FinishReason.STOP)])
    assert from_engine(await first.frames.get()) == [FinishEvent("a", FinishReason.STOP)]
    assert replica.gateways.num_requests == 2


async def test_steps_that_wait_are_one_frame() -> None:
    replica = Replica()
    sink = await replica.attach("g")
    replica.gateways.take("g", body_of([Submit(request("a"))]))
    for token in (5, 6):  # while the event loop is busy
        replica.gateways.send([TokenEvent("a", token, None)])
    assert from_engine(await sink.frames.get()) == [TokenEvent("a", 5, None), TokenEvent("a", 6, None)]
    sink.can_write = False  # the gateway does not read
    for token in (7, 8):
        replica.gateways.send([TokenEvent("a", token, None)])
        await _turn()
    assert sink.frames.empty()
    sink.can_write = True
    replica.gateways.flush("g")
    assert from_engine(await sink.frames.get()) == [TokenEvent("a", 7, None), TokenEvent("a", 8, None)]
    replica.gateways.flush("unknown")


async def test_messages_that_cannot_be_told_end_the_connection_of_their_gateway_alone() -> None:
    replica = Replica()
    first, second = await replica.attach("g"), await replica.attach("h")
    for gateway, name in (("g", "a"), ("g", "b"), ("h", "c")):
        replica.gateways.take(gateway, body_of([Submit(request(name))]))
    replica.gateways.send([TokenEvent("a", 2**70, None), *(FinishEvent(name, FinishReason.STOP) for name in "bc")])
    async with asyncio.timeout(5):
        await first.is_closed.wait()
        assert from_engine(await second.frames.get()) == [FinishEvent("c", FinishReason.STOP)]
    assert not second.is_closed.is_set()
    replica.gateways.send([TokenEvent("a", 6, None)])  # the next step, before the gateway has gone
    replica.gateways.report(Reply(1))
    await _turn()
    assert first.frames.empty(), "nothing follows what was lost"
    assert not second.frames.empty()


async def test_calls_of_two_gateways_with_one_id_are_told_apart() -> None:
    replica = Replica()
    first, second = await replica.attach("g"), await replica.attach("h")
    for gateway in "gh":
        replica.gateways.take(gateway, body_of([Ping(7)]))
    replica.gateways.ask(OWN, GetStats(7))
    ids = [message.call_id for message in replica.taken if isinstance(message, Ping | GetStats)]
    assert len(set(ids)) == 3
    replica.gateways.send([Reply(ids[1]), Reply(ids[0]), Reply(ids[2])])
    assert from_engine(await first.frames.get()) == [Reply(7)]
    assert from_engine(await second.frames.get()) == [Reply(7)]
    assert replica.own == [Reply(7)]


async def test_gateway_that_leaves_has_its_requests_aborted_and_is_heard_no_more() -> None:
    replica = Replica()
    await replica.attach("g")
    replica.gateways.take("g", body_of([Submit(request("a")), Ping(1)]))
    replica.gateways.detach("g")
    assert replica.taken[-1] == Abort("a")
    assert replica.gateways.num_requests == 0
    before = list(replica.taken)
    replica.gateways.take("g", body_of([Submit(request("b"))]))
    assert replica.taken == before


async def test_request_that_its_gateway_aborts_is_forgotten() -> None:
    """Answers that end by a stop string end so: the engine sends nothing after it."""
    replica = Replica()
    await replica.attach("g")
    other = await replica.attach("h")
    for gateway, name in (("g", "a"), ("h", "b")):
        replica.gateways.take(gateway, body_of([Submit(request(name))]))
    replica.gateways.take("g", body_of([Abort("a", is_answered=True), Abort("b")]))
    assert replica.gateways.num_requests == 1
    replica.gateways.send([TokenEvent("b", 5, None)])
    assert from_engine(await other.frames.get()) == [TokenEvent("b", 5, None)]
    before = list(replica.taken)
    replica.gateways.detach("g")
    assert replica.taken == before, "it has nothing left that could be aborted"


async def test_each_gateway_answers_for_its_own_stores_until_it_leaves() -> None:
    replica = Replica()
    first, second = await replica.attach("g"), await replica.attach("h")
    assert replica.gateways.attached == ("g", "h")
    for gateway, call_id in (("h", 1), ("g", 2)):
        replica.gateways.post(gateway, OpenBlob(call_id, "sha256:a", True))
    assert from_engine(await first.frames.get()) == [OpenBlob(2, "sha256:a", True)]
    assert from_engine(await second.frames.get()) == [OpenBlob(1, "sha256:a", True)]
    folder = BlobFolder(Path("/b"), "disk", 0.0, 0.0, Path("/t"))
    for _ in range(2):  # an answer counts once
        replica.gateways.take("h", body_of([Reply(1, folder)]))
    assert replica.answered == [Reply(1, folder)]
    replica.gateways.post("h", CloseBlob(1))
    assert from_engine(await second.frames.get()) == [CloseBlob(1)]
    replica.gateways.detach("g")  # it leaves with a call open
    assert replica.gateways.attached == ("h",)
    assert replica.answered[-1].call_id == 2
    assert isinstance(replica.answered[-1].error, AdapterUnavailableError)
    replica.gateways.post("g", OpenBlob(3, "sha256:c", True))
    await _turn()
    assert replica.answered[-1].call_id == 3
    assert isinstance(replica.answered[-1].error, AdapterUnavailableError)
    replica.gateways.detach("h")


async def test_engines_call_is_known_by_the_gateway_that_made_it() -> None:
    replica = Replica()
    await replica.attach("g")
    replica.gateways.take("g", body_of([Ping(7)]))
    (asked,) = (message for message in replica.taken if isinstance(message, Ping))
    assert replica.gateways.caller_of(asked.call_id) == ("g", 7)
    replica.gateways.detach("g")
    with pytest.raises(AdapterUnavailableError, match="left"):
        replica.gateways.caller_of(asked.call_id)


async def _turn() -> None:
    import asyncio

    await asyncio.sleep(0.01)
