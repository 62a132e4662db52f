"""The client against a server that behaves like vLLM, well and badly."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from lora_serve.commands.bench.load import run_load
from lora_serve.commands.bench.report import RequestRecord
from lora_serve.commands.bench.workload import Plan, PlannedRequest, Target
from tests.commands.bench.fake_server import Call, Script, fake_server

REQUEST = PlannedRequest((5, 6, 7), None, 4)
PAUSE = 0.03


async def one(script: Script, request: PlannedRequest = REQUEST, **options: Any) -> RequestRecord:
    async with fake_server(script) as fake:
        result = await run_load(Target(fake.url, "base", **options), Plan((request,), concurrency=1))
    (record,) = result.records
    return record


async def words(call: Call, *texts: str) -> None:
    for text in texts:
        await call.chunk(text)
        await asyncio.sleep(PAUSE)


async def test_each_chunk_with_a_running_total_brings_as_many_tokens_as_the_total_grew() -> None:
    async def script(call: Call) -> web.StreamResponse:
        for text, total in (("a b", 2), ("", 3), (" c d e", 6)):
            await call.chunk(text, usage={"prompt_tokens": 9, "completion_tokens": total})
            await asyncio.sleep(PAUSE)
        await call.chunk("", "length", usage={"prompt_tokens": 9, "completion_tokens": 6})
        await call.usage(9, 6)
        return await call.done()

    record = await one(script)
    assert [chunk.num_tokens for chunk in record.chunks] == [2, 1, 3]
    assert (record.counted_by, record.prompt_tokens, record.text) == ("continuous", 9, "a b c d e")
    assert len(record.gaps) == 5
    assert sum(record.gaps) == pytest.approx(record.chunks[-1].time - record.chunks[0].time)
    assert record.gaps[0] == 0.0
    assert record.gaps[2] == record.gaps[3] == record.gaps[4] == pytest.approx(record.chunk_gaps[1] / 3)


async def test_only_a_total_at_the_end_is_spread_over_the_chunks() -> None:
    async def script(call: Call) -> web.StreamResponse:
        await words(call, "a", "b", "c")
        await call.chunk("", "length")
        await call.usage(3, 7)
        return await call.done()

    record = await one(script, usage="final")
    assert record.counted_by == "usage"
    assert sorted(chunk.num_tokens for chunk in record.chunks) == [2, 2, 3]
    assert record.error is None


async def test_a_total_within_the_last_chunk_of_the_choice_counts_the_same() -> None:
    async def script(call: Call) -> web.StreamResponse:
        await words(call, "a", "b")
        await call.chunk("c", "length", usage={"prompt_tokens": 3, "completion_tokens": 3})
        return await call.done()

    record = await one(script)
    assert [chunk.num_tokens for chunk in record.chunks] == [1, 1, 1]
    assert record.counted_by == "usage"


async def test_without_any_count_each_chunk_is_one_token_and_the_record_says_so() -> None:
    async def script(call: Call) -> web.StreamResponse:
        await words(call, "a", "b")
        await call.chunk("", "stop")
        return await call.done()

    record = await one(script, usage="none")
    assert (record.output_tokens, record.counted_by, record.finish_reason) == (2, "chunks", "stop")


async def test_events_in_one_packet_are_one_arrival() -> None:
    async def script(call: Call) -> web.StreamResponse:
        await words(call, "a")
        chunk = 'data: {"choices":[{"text":"b","finish_reason":null}]}\n\n'
        await call.response.write((chunk * 3).encode())
        await call.chunk("", "length")
        return await call.done()

    record = await one(script)
    assert [chunk.num_tokens for chunk in record.chunks] == [1, 3]


async def test_events_cut_anywhere_with_comments_and_carriage_returns_are_read() -> None:
    async def script(call: Call) -> web.StreamResponse:
        await call.response.prepare(call.request)
        text = ': ping\r\n\r\nevent: x\r\ndata:{"choices":[{"text":"ä",\r\ndata: "finish_reason":"stop"}]}\r\n\r\n'
        raw = text.encode()
        for start in range(0, len(raw), 7):
            await call.response.write(raw[start : start + 7])
            await asyncio.sleep(0.001)
        return await call.done()

    record = await one(script)
    assert (record.text, record.output_tokens, record.error) == ("ä", 1, None)


async def test_the_role_of_a_chat_is_no_token() -> None:
    async def script(call: Call) -> web.StreamResponse:
        await call.event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        await asyncio.sleep(PAUSE)
        await call.event({"choices": [{"delta": {"content": "hi"}, "finish_reason": None}]})
        await call.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        return await call.done()

    record = await one(script, PlannedRequest("hello", "acme/a", 4), endpoint="chat")
    assert (record.text, record.output_tokens) == ("hi", 1)
    assert record.first_token >= PAUSE


async def test_a_refusal_is_named_by_its_status() -> None:
    async def script(call: Call) -> web.StreamResponse:
        return web.json_response({"error": {"message": "slow down"}}, status=429)

    record = await one(script)
    assert record.error == "http_429"
    assert "slow down" in record.detail
    assert record.chunks == ()


async def test_an_error_in_mid_stream_keeps_what_had_come() -> None:
    async def script(call: Call) -> web.StreamResponse:
        await words(call, "a", "b")
        await call.event({"error": {"message": "out of memory", "code": 500}})
        return await call.done()

    record = await one(script)
    assert (record.error, record.detail, record.output_tokens) == ("stream_error", "out of memory", 2)


@pytest.mark.parametrize("is_polite", [True, False])
async def test_a_stream_that_stops_before_its_end_is_a_hang_up(is_polite: bool) -> None:
    async def script(call: Call) -> web.StreamResponse:
        await words(call, "a")
        if not is_polite:
            return call.hang_up()
        await call.response.write_eof()
        return call.response

    record = await one(script)
    assert (record.error, record.output_tokens) == ("hang_up", 1)


async def test_an_answer_that_takes_too_long_is_a_timeout() -> None:
    async def script(call: Call) -> web.StreamResponse:
        await words(call, "a")
        await asyncio.Event().wait()
        raise AssertionError

    record = await one(script, timeout=0.2)
    assert record.error == "timeout"
    assert record.ended < 5


async def test_nobody_at_the_address_and_no_stream_at_all_are_told_apart() -> None:
    result = await run_load(Target("http://127.0.0.1:9", "base"), Plan((REQUEST,), 1))
    assert result.records[0].error == "connection"

    async def script(call: Call) -> web.StreamResponse:
        return web.json_response({"choices": [{"text": "a"}]})

    assert (await one(script)).error == "bad_stream"


async def quick(call: Call) -> web.StreamResponse:
    await words(call, "a")
    await call.chunk("b", "length")
    return await call.done()


async def test_a_closed_loop_keeps_so_many_under_way_and_no_more() -> None:
    under_way, most = 0, 0

    async def script(call: Call) -> web.StreamResponse:
        nonlocal under_way, most
        under_way, most = under_way + 1, max(most, under_way + 1)
        await words(call, "a", "b")
        under_way -= 1
        await call.chunk("", "length")
        return await call.done()

    async with fake_server(script) as fake:
        result = await run_load(Target(fake.url, "base"), Plan((REQUEST,) * 10, concurrency=3))
    assert most == 3
    assert [record.index for record in result.records] == list(range(10))
    assert result.output_tokens_per_s == pytest.approx(20 / result.seconds)


async def test_an_open_loop_sends_at_its_times_and_counts_from_them() -> None:
    requests = [PlannedRequest((5,), None, 2, at=at) for at in (0.0, 0.05, 0.2)]
    async with fake_server(quick) as fake:
        result = await run_load(Target(fake.url, "base"), Plan(requests))
    for record, request in zip(result.records, requests, strict=True):
        assert record.planned == request.at
        assert record.planned <= record.sent < record.planned + 0.1
    async with fake_server(quick) as fake:
        crowded = await run_load(Target(fake.url, "base"), Plan([requests[0]] * 3, concurrency=1))
    assert crowded.records[2].sent > 2 * PAUSE
    assert crowded.records[2].first_token >= crowded.records[2].sent


async def test_after_its_duration_nothing_is_sent_and_the_last_answers_are_awaited() -> None:
    def endless() -> Any:
        while True:
            yield REQUEST

    async with fake_server(quick) as fake:
        result = await run_load(Target(fake.url, "base"), Plan(endless(), concurrency=2, duration=0.3))
    assert len(result.records) > 4
    assert not result.failed
    assert all(record.sent < 0.35 for record in result.records)


async def test_whoever_is_not_answered_when_the_run_is_over_is_cut_off() -> None:
    async def script(call: Call) -> web.StreamResponse:
        await words(call, "a")
        await asyncio.Event().wait()
        raise AssertionError

    async with fake_server(script) as fake:
        plan = Plan([PlannedRequest((5,), None, 2, at=0.0)], cut_off=0.2)
        result = await run_load(Target(fake.url, "base"), plan)
    assert result.records[0].error == "cut_off"


async def test_the_warm_up_is_sent_first_and_is_in_no_record() -> None:
    async with fake_server(quick) as fake:
        warmup = (PlannedRequest((1, 2), "acme/a", 1),) * 2
        done: list[RequestRecord] = []
        result = await run_load(Target(fake.url, "base"), Plan((REQUEST,), 2, warmup=warmup), done.append)
    assert [body["model"] for body in fake.bodies] == ["acme/a", "acme/a", "base"]
    assert done == list(result.records)
    assert len(done) == 1


@pytest.mark.parametrize(
    ("adapter_field", "named", "base"),
    [
        ("model", {"model": "7"}, {"model": "base"}),
        ("adapter_id", {"model": "base", "adapter_id": "7"}, {"model": "base", "adapter_id": None}),
        ("header", {"model": "base"}, {"model": "base"}),
        ("llama-cpp", {"model": "base", "lora": [{"id": 7, "scale": 1.0}]}, {"lora": [{"id": 0, "scale": 0.0}]}),
    ],
)
async def test_each_server_is_told_the_adapter_in_its_own_way(adapter_field: Any, named: Any, base: Any) -> None:
    async with fake_server(quick) as fake:
        target = Target(
            fake.url + "/v1", "base", adapter_field=adapter_field, api_key="secret", extra_body={"top_k": 1}
        )
        await run_load(target, Plan((PlannedRequest((5,), "7", 2), REQUEST), 1))
    for call, expected, header in zip(fake.calls, (named, base), ("7", None), strict=True):
        assert {name: call.body.get(name) for name in expected} == expected
        assert call.request.headers.get("X-Adapter-Id") == (header if adapter_field == "header" else None)
        assert call.request.headers["Authorization"] == "Bearer secret"
        assert call.body["top_k"] == 1
        assert call.body["ignore_eos"] is True
