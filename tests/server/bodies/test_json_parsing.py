"""Large bodies mean what small ones mean, and are refused for the same reasons."""

from __future__ import annotations

import signal
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from lora_serve.core.errors import CapacityError, InvalidRequestError
from lora_serve.server.json_parsing import MAX_VALUES, fields_of, known_fields
from lora_serve.server.large_bodies import LargeBodies
from lora_serve.server.schemas.fields import TOKEN_ID_NAMES, known_names


def read(raw: bytes) -> dict[str, Any]:
    return known_fields(raw, known_names(), TOKEN_ID_NAMES)


async def parsed(bodies: LargeBodies, raw: bytes) -> dict[str, Any]:
    return await bodies.parse(raw, fields_of)


@pytest.fixture(scope="module")
def bodies() -> Iterator[LargeBodies]:
    made = LargeBodies()
    yield made
    made.close()


async def test_unknown_fields_are_ignored_however_many_they_are(bodies: LargeBodies) -> None:
    raw = b"{" + b"".join(b'"k%d": [[], {"a": "x"}],' % number for number in range(100_000)) + b'"prompt": "x"}'
    assert await parsed(bodies, raw) == {"prompt": "x"}


@pytest.mark.parametrize(
    "junk", [b"[" + b"1, " * 50_000 + b"1e999]", b'"' + b"a" * 100_000 + b'\\ud800"', b"[" * 10**5]
)
async def test_unknown_fields_are_checked_all_the_same(bodies: LargeBodies, junk: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        await parsed(bodies, b'{"junk": ' + junk + b', "prompt": "x"}')


async def test_numbers_and_depths_come_back_as_they_were(bodies: LargeBodies) -> None:
    value = {"logit_bias": {"1": 10**400}, "tokens": [], "prompt": [[1, 2], [], ["a"]], "metadata": [True, None, 1.5]}
    raw = b'{"logit_bias": {"1": 1%b}, "tokens": [], "prompt": [[1, 2], [], ["a"]], "metadata": [true, null, 1.5]}'
    assert await parsed(bodies, raw % (b"0" * 400)) == value | {"prompt": [array("q", [1, 2]), [], ["a"]]}
    for depth in (900, *range(960, 1000), 10**6):
        try:
            assert await parsed(bodies, b'{"metadata": ' + b"[" * depth + b"]" * depth + b"}")
        except InvalidRequestError as error:
            assert depth > 900
            assert "too deeply" in str(error)  # noqa: PT017 -- both may be, nothing else


def test_known_fields_hold_so_many_values_and_no_more() -> None:
    for one in (b'{"role": "user"}', b'"a"', b"[]", b"1"):
        body = b'{"messages": [' + one + (b"," + one) * MAX_VALUES + b"]}"
        with pytest.raises(InvalidRequestError, match="`messages`: a large request body"):
            read(body)
    twice = b'"stop": [1' + b",1" * 90_000 + b"]"
    assert len(read(b"{" + twice + b"," + twice + b"}")["stop"]) == 90_001


def test_token_ids_are_kept_as_numbers() -> None:
    ids = b",".join(b"%d" % number for number in range(300_000))
    found = read(b'{"prompt": [' + ids + b"]}")["prompt"]
    assert isinstance(found, array)
    assert found == array("q", range(300_000))
    assert read(b'{"prompt": [-1]}')["prompt"] == array("q", [-1])
    lists = read(b'{"prompt": [[' + ids + b'], [5, 6], ["a"]]}')["prompt"]
    assert [type(item) for item in lists] == [array, array, list]
    for other in (b'"a"', b"1.5", b"[1]", b"9" * 30):
        for mixed in (ids + b"," + other, other + b"," + ids):
            with pytest.raises(InvalidRequestError, match="token id"):
                read(b'{"prompt": [' + mixed + b"]}")


async def test_ended_process_is_replaced() -> None:
    bodies = LargeBodies()
    assert await parsed(bodies, b'{"prompt": "x"}') == {"prompt": "x"}
    (worker,) = bodies._workers._idle
    worker._process.send_signal(signal.SIGKILL)
    with pytest.raises(CapacityError):
        await parsed(bodies, b'{"prompt": "x"}')
    assert await parsed(bodies, b'{"prompt": "x"}') == {"prompt": "x"}
    bodies.close()
    assert bodies._workers._idle == []
