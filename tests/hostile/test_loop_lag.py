"""The largest bodies that the limits allow, of every shape, on every route that reads JSON: the event loop stays free.

Held against the limit, in one of three attempts: each turn of the loop, in processor time of its thread; each lag, less
what the machine took.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable, Mapping
from itertools import product

import pytest

from tests.attempts import in_some_attempt
from tests.canary.house import ADMIN, House
from tests.canary.loop_lag import INTERVAL, LIMIT, LagFigures
from tests.hostile.sending import Reply, assert_refused, call, send
from tests.tiers import mostly_nightly

SIZE = 15 * 2**20  # bytes; the default of --max-body-size is 16 MiB


def filled(begin: bytes, part: bytes, end: bytes, size: int = SIZE) -> bytes:
    """`part` as often as there is room."""
    return begin + part * ((size - len(begin) - len(end)) // len(part)) + end


def _keys() -> bytes:
    return b"{" + b",".join(b'"k%d":1' % number for number in range(1_250_000)) + b"}"


_CHAT = b'{"messages":[{"role":"user","content":"x"}],'
_TOOL = b'{"type":"function","function":{"name":"f","parameters":{"type":"object",'
_CALLS = b'{"messages":[{"role":"assistant","tool_calls":['

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
    "tools": lambda: filled(_CHAT + b'"tools":[', b'{"type":"function","function":{"name":"f"}},', b"1]}"),
    "tool_schema": lambda: filled(_CHAT + b'"tools":[' + _TOOL + b'"enum":[', b"{},", b"1]}}}]}"),
    "tool_description": lambda: filled(_CHAT + b'"tools":[' + _TOOL + b'"title":"', b"a<b ", b'"}}}]}'),
    "calls": lambda: filled(_CALLS, b'{"function":{"name":"f","arguments":"{}"}},', b"1]}]}"),
    "arguments": lambda: filled(_CALLS + b'{"function":{"name":"f","arguments":"', b"[", b'"}}]}]}'),
    "arguments_object": lambda: filled(_CALLS + b'{"function":{"name":"f","arguments":{"a":[', b"{},", b"1]}}}]}]}"),
    "template_values": lambda: filled(_CHAT + b'"chat_template_kwargs":{"a":[', b"{},", b"1]}}"),
    "duplicates": lambda: filled(b"{", b'"prompt":1,', b'"prompt":"x"}'),
    "format": lambda: filled(b'{"prompt":"x","response_format":{"type":"json_schema","s":[', b"{},", b"1]}}"),
    "blanks": lambda: filled(b'{"prompt":', b" ", b'"x"}'),
    "no_object": lambda: filled(b"[", b"1,", b"1]"),
    "metadata": lambda: filled(b'{"id":"acme/x","source":"/x","metadata":{"a":[', b"[],", b"1]}}"),
}
ROUTES = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/admin/adapters", "/admin/tenants")


def meant(name: str) -> str:
    """The route that reads most of such a body."""
    routes = {"messages": 1, "one_message": 1, "parts": 1, "text": 2, "ids_anywhere": 3, "metadata": 4, "keys": 5}
    of_tools = ("tools", "tool_schema", "tool_description", "calls", "arguments", "arguments_object", "template_values")
    return ROUTES[(routes | dict.fromkeys(of_tools, 1)).get(name, 0)]


def send_measured(house: House, path: str, raw: bytes, headers: Mapping[str, str] | None = None) -> Reply:
    """The answer; the event loop was free all the while."""
    named = {"Content-Type": "application/json", **ADMIN, **(headers or {})}
    return measured(house, lambda: call(house, "POST", path, raw, named))


def measured(house: House, ask: Callable[[], Reply]) -> Reply:
    """The answer; the event loop was free all the while."""

    def attempt() -> Reply:
        before = house.lag.mark()
        reply = ask()
        assert_free_since(house, before)
        return reply

    return in_some_attempt(attempt)


def assert_free_since(house: House, before: LagFigures) -> None:
    house.on_loop(asyncio.sleep(2 * INTERVAL))  # what was late is known then
    during = house.lag.since(before)
    print(during)
    assert during.longest_turn[0] <= LIMIT, str(during)
    assert max(during.lags) <= LIMIT, str(during)


LIKE_OTHERS = (  # what reads them has another such body by day
    "ignored_lists", "wide_escapes", "fractions", "stop_ids", "tool_description", "template_values", "ids_anywhere",
    "utf_8", "fraction", "one_message", "tool_schema", "calls", "arguments_object", "format", "no_object", "parts",
)  # fmt: skip
BY_DAY = [(name, meant(name)) for name in BODIES if name not in LIKE_OTHERS]


@pytest.mark.parametrize(("name", "path"), mostly_nightly(product(BODIES, ROUTES), *BY_DAY))
def test_largest_body_of_any_shape_holds_up_nobody(house: House, name: str, path: str) -> None:
    assert_refused(house, send_measured(house, path, BODIES[name]()), (200, 400, 422))


@pytest.mark.parametrize("encoding", mostly_nightly(["gzip", "deflate"], "gzip"))
def test_body_that_is_unpacked_to_the_limit_holds_up_nobody(house: House, encoding: str) -> None:
    pack = gzip.compress if encoding == "gzip" else zlib.compress
    for raw in (filled(b'{"prompt":"', b"a", b'"}'), filled(b'{"prompt":[', b"1,", b"1]}")):
        packed = pack(raw)
        assert_refused(house, send_measured(house, "/v1/completions", packed, {"Content-Encoding": encoding}), 400)


def test_gzip_of_many_members_holds_up_nobody(house: House) -> None:
    packed = gzip.compress(b'{"prompt": "x", "max_tokens": 1') + gzip.compress(b"") * 400_000 + gzip.compress(b"}")
    reply = send_measured(house, "/v1/completions", packed, {"Content-Encoding": "gzip"})
    assert_refused(house, reply, (200, 400))


def test_body_in_chunks_of_one_byte_holds_up_nobody(house: House) -> None:
    body = b'{"prompt": "x", "max_tokens": 1, "junk": "' + b"a" * 500_000 + b'"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    key = f"Authorization: {ADMIN['Authorization']}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    reply = measured(house, lambda: send(house, head + key + chunks))
    assert reply.status == 200, reply.body


@pytest.mark.parametrize(
    ("path", "stream"),
    mostly_nightly(
        product(("/v1/completions", "/v1/chat/completions"), (False, True)),
        ("/v1/completions", False),
        ("/v1/chat/completions", True),
    ),
)
def test_answer_with_many_log_probabilities_holds_up_nobody(house: House, path: str, stream: bool) -> None:
    most = {"n": 16, "max_tokens": 16, "ignore_eos": True, "stream": stream}
    if not stream:  # whose chunks have no place for them
        most["prompt_logprobs"] = 20
    if path.endswith("chat/completions"):
        body = {**most, "messages": [{"role": "user", "content": "a " * 20}], "logprobs": True, "top_logprobs": 20}
    else:
        body = {**most, "prompt": [[7, number, *[9] * 76] for number in range(6)], "logprobs": 20, "echo": True}
    reply = send_measured(house, path, json.dumps(body).encode())
    assert reply.status == 200, reply.body[:500]
    if not stream:  # it is not parsed here, which would hold up the server in this same process
        assert reply.body.count(b'"finish_reason"') == (16 if "messages" in body else 96)
        assert reply.body.count(b'"top_logprobs"') >= (256 if "messages" in body else 96)


def test_answers_of_a_tokenizer_hold_up_nobody(house: House) -> None:
    """Up to two million ids, each of which may be spelled."""
    ids = send_measured(house, "/detokenize", filled(b'{"tokens":[', b"77,", b"78]}", 5_900_000))
    assert ids.status == 200, ids.body[:500]
    spelled = b'{"prompt": "' + b"ab " * 16_000 + b'", "return_token_strs": true}'
    assert send_measured(house, "/tokenize", spelled).status == 200


@pytest.mark.parametrize("key", [{}, {"Authorization": ADMIN["Authorization"]}], ids=["nobody", "somebody"])
def test_bomb_is_not_unpacked_once_it_is_refused(house: House, key: Mapping[str, str]) -> None:
    """16 GB in 16 MB."""
    bomb = gzip.compress(b" " * 2**24) * 1000
    named = {"Content-Type": "application/json", "Content-Encoding": "gzip", **key}
    reply = measured(house, lambda: call(house, "POST", "/v1/completions", bomb[: 2**24 - 1], named))
    assert reply.status in (401, 413, 0)  # 0: it was closed before all of it was sent
