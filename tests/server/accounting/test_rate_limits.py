"""What limited callers see: headers on every answer, 429 in OpenAI's form, and tokens that come back."""

from __future__ import annotations

import asyncio

import aiohttp
import openai
import pytest

from lora_serve.core.errors import InternalError
from lora_serve.core.tenant import Quota
from lora_serve.server.context import duration
from tests.mock_engine import MockReply
from tests.server.accounting.conftest import NewKey, bearer, complete
from tests.server.conftest import BASE, House
from tests.tenancy.limited import Clock

TOKENS = Quota(tokens_per_minute=100)


async def tokens_left(house: House, http: aiohttp.ClientSession, secret: str) -> int:
    """As the next answer tells, its own six not counted."""
    await house.services.quotas.settled()
    response = await complete(http, secret)
    assert response.status == 200
    return int(response.headers["x-ratelimit-remaining-tokens"]) + 6


async def test_answers_tell_how_the_limits_stand(http: aiohttp.ClientSession, new_key: NewKey) -> None:
    response = await complete(http, new_key("acme", Quota(requests_per_minute=10, tokens_per_minute=100)))
    assert {name: value for name, value in response.headers.items() if name.startswith("x-ratelimit")} == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "9",
        "x-ratelimit-reset-requests": "2m0s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "94",
        "x-ratelimit-reset-tokens": "2m0s",
    }


async def test_callers_without_limits_get_no_such_headers(http: aiohttp.ClientSession, new_key: NewKey) -> None:
    response = await complete(http, new_key("free"))
    assert response.status == 200
    assert not [name for name in response.headers if name.startswith("x-ratelimit")]


async def test_openai_client_sees_a_rate_limit_error_with_its_headers(
    house: House, new_key: NewKey, clock: Clock
) -> None:
    secret = new_key("acme", Quota(requests_per_minute=1))
    async with openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key=secret, max_retries=0) as client:
        await client.completions.create(model=BASE, prompt="a", max_tokens=1)
        for _ in range(2):  # the second is refused before its body is read
            with pytest.raises(openai.RateLimitError) as caught:
                await client.completions.create(model=BASE, prompt="a", max_tokens=1)
            headers = caught.value.response.headers
            assert caught.value.code == "rate_limit_exceeded"
            assert caught.value.type == "rate_limit_error"
            assert "1" in caught.value.message
            assert (headers["retry-after"], headers["x-ratelimit-remaining-requests"]) == ("120", "0")
        clock.now += 121
        await client.completions.create(model=BASE, prompt="a", max_tokens=1)
    assert 'lora_serve_requests_refused_total{reason="tenant_requests_per_minute"} 2.0' in await metrics(house)


async def metrics(house: House) -> str:
    async with aiohttp.ClientSession(house.url) as http, http.get("/metrics") as response:
        return await response.text()


async def test_max_tokens_is_reserved_and_what_was_not_generated_comes_back(
    house: House, http: aiohttp.ClientSession, new_key: NewKey
) -> None:
    secret = new_key("acme", TOKENS)
    house.engine.script = lambda request: MockReply(token_ids=[5, 6])
    response = await complete(http, secret, max_tokens=60)
    assert response.headers["x-ratelimit-remaining-tokens"] == "36"
    assert await tokens_left(house, http, secret) == 94


async def test_choices_share_their_prompt(house: House, http: aiohttp.ClientSession, new_key: NewKey) -> None:
    response = await complete(http, new_key("acme", TOKENS), prompt=[[1, 2, 3], [4, 5]], n=3, max_tokens=2)
    assert response.headers["x-ratelimit-remaining-tokens"] == str(100 - 5 - 12)


async def test_tokens_come_back_when_the_engine_fails(
    house: House, http: aiohttp.ClientSession, new_key: NewKey
) -> None:
    secret = new_key("acme", TOKENS)
    house.engine.script = lambda request: MockReply(error=InternalError("broken"))
    assert (await complete(http, secret)).status == 500
    house.engine.script = lambda request: MockReply(error=InternalError("broken"), error_after=1)
    assert (await complete(http, secret, max_tokens=50)).status == 500
    house.engine.script = lambda request: MockReply()
    assert await tokens_left(house, http, secret) == 100 - 4 - 1


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_and_places_come_back_when_the_client_leaves(
    house: House, http: aiohttp.ClientSession, new_key: NewKey, stream: bool
) -> None:
    secret, gate = new_key("acme", Quota(tokens_per_minute=100, max_running=1)), asyncio.Event()
    house.engine.script = lambda request: MockReply(gate=gate)
    sent = [asyncio.create_task(complete(http, secret, max_tokens=40, stream=stream)) for _ in range(2)]
    while not house.engine.requests or not house.services.quotas.concurrency.num_waiting:
        await asyncio.sleep(0.001)
    assert len(house.engine.requests) == 1, "the other waits for its place"
    for task in sent:
        task.cancel()
    await asyncio.gather(*sent, return_exceptions=True)
    while house.services.lifecycle.num_inside:
        await asyncio.sleep(0.001)
    house.engine.script = lambda request: MockReply()
    places = house.services.quotas.concurrency
    assert (places.num_held, places.num_waiting, house.engine.gate.num_requests) == (0, 0, 0)
    assert await tokens_left(house, http, secret) == 100


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_while_its_prompt_is_computed_pays_for_the_prompt(
    house: House, http: aiohttp.ClientSession, new_key: NewKey, stream: bool
) -> None:
    secret, gate = new_key("acme", TOKENS), asyncio.Event()
    house.engine.script = lambda request: MockReply(gate=gate, has_started=True)
    sent = asyncio.create_task(complete(http, secret, prompt=list(range(1, 31)), max_tokens=40, n=2, stream=stream))
    while len(house.engine.requests) < 2:
        await asyncio.sleep(0.001)
    sent.cancel()
    await asyncio.gather(sent, return_exceptions=True)
    while house.services.lifecycle.num_inside:
        await asyncio.sleep(0.001)
    house.engine.script = lambda request: MockReply()
    assert await tokens_left(house, http, secret) == 100 - 30


async def test_client_that_leaves_in_the_middle_of_a_stream_pays_for_what_was_generated(
    house: House, http: aiohttp.ClientSession, new_key: NewKey
) -> None:
    secret = new_key("acme", TOKENS)
    house.engine.script = lambda request: MockReply(token_ids=[5] * 20, delay=0.05)
    body = {"model": BASE, "prompt": [1, 2, 3, 4], "max_tokens": 50, "stream": True}
    async with http.post("/v1/completions", json=body, headers=bearer(secret)) as response:
        await response.content.readline()
        response.close()
    while house.services.lifecycle.num_inside:
        await asyncio.sleep(0.001)
    house.engine.script = lambda request: MockReply()
    left = await tokens_left(house, http, secret)
    assert 100 - 4 - 20 <= left <= 100 - 4 - 1


async def test_rows_beyond_max_running_wait_and_requests_beyond_max_queued_are_refused(
    house: House, http: aiohttp.ClientSession, new_key: NewKey
) -> None:
    secret, other = new_key("acme", Quota(max_running=1, max_queued=2)), new_key("globex")
    gate = asyncio.Event()
    house.engine.script = lambda request: MockReply(gate=gate, delay=0.01)
    async with asyncio.TaskGroup() as tasks:
        sent = [tasks.create_task(complete(http, secret)) for _ in range(2)]
        while house.engine.gate.num_requests < 2:
            await asyncio.sleep(0.001)
        refused = await complete(http, secret)
        assert refused.status == 429
        assert "Retry-After" in refused.headers
        sent.append(tasks.create_task(complete(http, other)))
        while len(house.engine.requests) < 2:
            await asyncio.sleep(0.001)
        assert [request.tenant for request in house.engine.requests] == ["acme", "globex"]
        gate.set()
    assert [task.result().status for task in sent] == [200, 200, 200]
    assert house.services.quotas.concurrency.num_held == 0


async def test_deadline_holds_while_a_row_waits_for_its_place(
    house: House, http: aiohttp.ClientSession, new_key: NewKey
) -> None:
    secret, gate = new_key("acme", Quota(max_running=1)), asyncio.Event()
    house.engine.script = lambda request: MockReply(gate=gate)
    first = asyncio.create_task(complete(http, secret))
    while not house.engine.requests:
        await asyncio.sleep(0.001)
    assert (await complete(http, secret, timeout_ms=1)).status == 504
    gate.set()
    assert (await first).status == 200


async def test_key_has_limits_of_its_own(http: aiohttp.ClientSession, new_key: NewKey) -> None:
    tight = new_key("acme", Quota(requests_per_minute=100), key_quota=Quota(requests_per_minute=1))
    loose = new_key("acme")
    assert (await complete(http, tight)).status == 200
    assert (await complete(http, tight)).status == 429
    assert (await complete(http, loose)).status == 200


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0001, "1ms"),
        (0.0123, "13ms"),
        (1, "1s"),
        (6.5, "6.5s"),
        (59.9991, "1m0s"),
        (60, "1m0s"),
        (121, "2m1s"),
    ],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text
