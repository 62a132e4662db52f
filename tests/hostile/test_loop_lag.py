"""The largest bodies that the limits allow, of every shape, on every route that reads JSON: the event loop stays free.

Held against the limit: each turn of the loop, in processor time of its thread; each lag, less what the machine took.
"""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Callable, Mapping

import pytest

from tests.canary.house import ADMIN, House
from tests.canary.loop_lag import INTERVAL, LIMIT
from tests.hostile.sending import Reply, assert_refused, call

SIZE = 15 * 2**20  # bytes; the default of --max-body-size is 16 MiB


def filled(begin: bytes, part: bytes, end: bytes, size: int = SIZE) -> bytes:
    """`part` as often as there is room."""
    return begin + part * ((size - len(begin) - len(end)) // len(part)) + end


def _keys() -> bytes:
    return b"{" + b",".join(b'"k%d":1' % number for number in range(1_250_000)) + b"}"


BODIES: dict[str, Callable[[], bytes]] = {
    "keys": _keys,
    "ids": lambda: filled(b'{"prompt":[', b"1,", b"1]}"),
    "ids_anywhere": lambda: filled(b'{"tokens":[', b"1,", b"1]}"),
    "lists_of_ids": lambda: filled(b'{"prompt":[', b"[7" + b",77" * 1000 + b"],", b"[1]]}"),
    "empty_lists": lambda: filled(b'{"prompt":[', b"[],", b"1]}"),
    "ignored_lists": lambda: filled(b'{"prompt":"x","junk":[', b"[],", b"1]}"),
    "depth": lambda: b'{"prompt":' + b"[" * (SIZE // 2) + b"]" * (SIZE // 2) + b"}",
    "text": lambda: filled(b'{"prompt":"', b"a", b'"}'),
    "escapes": lambda: filled(b'{"prompt":"', b"\\n", b'"}'),
    "wide_escapes": lambda: filled(b'{"prompt":"', b"\\ud83d\\ude00", b'"}'),
    "utf_8": lambda: filled(b'{"prompt":"', "漢".encode(), b'"}'),
    "digits": lambda: filled(b'{"prompt":"x","seed":', b"9", b"}"),
    "fraction": lambda: filled(b'{"prompt":"x","top_p":0.', b"1", b"}"),
    "fractions": lambda: filled(b'{"prompt":[', b"0." + b"7" * 500_000 + b",", b"1]}"),
    "stops": lambda: filled(b'{"prompt":"x","stop":[', b'"a",', b'"b"]}'),
    "stop_ids": lambda: filled(b'{"prompt":"x","stop_token_ids":[', b"1,", b"1]}"),
    "biases": lambda: b'{"prompt":"x","logit_bias":{' + b",".join(b'"%d":1' % n for n in range(1_300_000)) + b"}}",
    "messages": lambda: filled(b'{"messages":[', b'{"role":"user","content":"x"},', b'{"role":"user","content":"x"}]}'),
    "one_message": lambda: filled(b'{"messages":[{"role":"user","content":"', b"a b ", b'"}]}'),
    "parts": lambda: filled(b'{"messages":[{"role":"user","content":[', b'{"type":"text","text":"x"},', b"1]}]}"),
    "duplicates": lambda: filled(b"{", b'"prompt":1,', b'"prompt":"x"}'),
    "format": lambda: filled(b'{"prompt":"x","response_format":{"type":"json_schema","s":[', b"{},", b"1]}}"),
    "blanks": lambda: filled(b'{"prompt":', b" ", b'"x"}'),
    "no_object": lambda: filled(b"[", b"1,", b"1]"),
    "metadata": lambda: filled(b'{"id":"acme/x","source":"/x","metadata":{"a":[', b"[],", b"1]}}"),
}
ROUTES = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/admin/adapters", "/admin/tenants")


def send_measured(house: House, path: str, raw: bytes, headers: Mapping[str, str] | None = None) -> Reply:
    """The answer; the event loop was free all the while."""
    before = house.lag.mark()
    reply = call(house, "POST", path, raw, {"Content-Type": "application/json", **ADMIN, **(headers or {})})
    house.on_loop(asyncio.sleep(2 * INTERVAL))  # what was late is known
    during = house.lag.since(before)
    print(path, during)
    assert during.longest_turn[0] <= LIMIT, str(during)
    assert max(during.lags) <= LIMIT, str(during)
    return reply


@pytest.mark.parametrize("name", BODIES)
def test_largest_body_of_any_shape_holds_up_nobody(house: House, name: str) -> None:
    raw = BODIES[name]()
    for path in ROUTES:
        assert_refused(house, send_measured(house, path, raw), (200, 400, 422))


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_body_that_is_unpacked_to_the_limit_holds_up_nobody(house: House, encoding: str) -> None:
    pack = gzip.compress if encoding == "gzip" else zlib.compress
    for raw in (filled(b'{"prompt":"', b"a", b'"}'), filled(b'{"prompt":[', b"1,", b"1]}")):
        packed = pack(raw)
        assert_refused(house, send_measured(house, "/v1/completions", packed, {"Content-Encoding": encoding}), 400)
