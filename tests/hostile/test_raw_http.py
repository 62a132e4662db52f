"""HTTP that no library sends: smuggling shapes, broken chunks, header bombs, half requests, other protocols.

Not repeated here: tests/server/sockets/test_framing.py, tests/server/sockets/test_connections.py.
"""

from __future__ import annotations

import json
import re
import socket
from contextlib import suppress

import pytest

from tests.canary.house import KEY, House
from tests.hostile.sending import TIMEOUT, assert_tells_nothing, send

BODY = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1}).encode()
KEY_LINE = f"Authorization: Bearer {KEY}\r\n".encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + KEY_LINE
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


def chunked(*chunks: bytes, head: bytes = b"Transfer-Encoding: chunked\r\n") -> bytes:
    return POST + head + b"\r\n" + b"".join(chunks)


ONE_CHUNK = b"%x\r\n%s\r\n" % (len(BODY), BODY)
LENGTH = b"Content-Length: %d\r\n" % len(BODY)

BROKEN: dict[str, bytes] = {
    "length_and_chunks": chunked(ONE_CHUNK, b"0\r\n\r\n", head=LENGTH + b"Transfer-Encoding: chunked\r\n"),
    "chunks_and_length": chunked(ONE_CHUNK, b"0\r\n\r\n", head=b"Transfer-Encoding: chunked\r\n" + LENGTH),
    "two_lengths": POST + LENGTH + b"Content-Length: 0\r\n\r\n" + BODY,
    "same_length_twice": POST + LENGTH + LENGTH + b"\r\n" + BODY,
    "lengths_in_one": POST + b"Content-Length: 5, 6\r\n\r\n" + BODY,
    "length_with_plus": POST + b"Content-Length: +5\r\n\r\n" + BODY,
    "length_hex": POST + b"Content-Length: 0x10\r\n\r\n" + BODY,
    "length_negative": POST + b"Content-Length: -1\r\n\r\n" + BODY,
    "length_words": POST + b"Content-Length: many\r\n\r\n" + BODY,
    "length_blank": POST + b"Content-Length: \r\n\r\n" + BODY,
    "length_underscore": POST + b"Content-Length: 1_0\r\n\r\n" + BODY,
    "length_unicode": POST + "Content-Length: \u0665\r\n\r\n".encode() + BODY,
    "length_giant": POST + b"Content-Length: " + b"9" * 400 + b"\r\n\r\n" + BODY,
    "unknown_transfer": chunked(ONE_CHUNK, b"0\r\n\r\n", head=b"Transfer-Encoding: cow\r\n"),
    "transfer_twice": chunked(ONE_CHUNK, b"0\r\n\r\n", head=b"Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n"),
    "transfer_chunked_first": chunked(ONE_CHUNK, b"0\r\n\r\n", head=b"Transfer-Encoding: chunked, identity\r\n"),
    "transfer_vertical_tab": chunked(ONE_CHUNK, b"0\r\n\r\n", head=b"Transfer-Encoding: \x0bchunked\r\n"),
    "transfer_space_before_colon": chunked(ONE_CHUNK, b"0\r\n\r\n", head=b"Transfer-Encoding : chunked\r\n"),
    "chunk_size_words": chunked(b"zz\r\n" + BODY, b"\r\n0\r\n\r\n"),
    "chunk_size_negative": chunked(b"-5\r\nhello\r\n0\r\n\r\n"),
    "chunk_size_0x": chunked(b"0x5\r\nhello\r\n0\r\n\r\n"),
    "chunk_size_giant": chunked(b"f" * 64 + b"\r\nhello\r\n"),
    "chunk_longer_than_said": chunked(b"2\r\nhello\r\n0\r\n\r\n"),
    "chunk_extension_bomb": chunked(b"5;" + b"a" * 100_000 + b"\r\nhello\r\n0\r\n\r\n"),
    "header_without_colon": GET + b"nonsense\r\n\r\n",
    "header_space_in_name": GET + b"X Y: 1\r\n\r\n",
    "header_folded": GET + b"X: a\r\n  b\r\n\r\n",
    "header_nul": GET + b"X: a\x00b\r\n\r\n",
    "header_bare_cr": GET + b"X: a\rY: b\r\n\r\n",
    "header_name_empty": GET + b": x\r\n\r\n",
    "header_bytes": GET + b"X: " + b"a" * 1_000_000 + b"\r\n\r\n",
    "headers_many": GET + b"".join(b"X%d: y\r\n" % i for i in range(20_000)) + b"\r\n",
    "request_line_long": b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "request_line_words": b"GET / HTTP/1.1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "request_line_space_first": b" GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "version_unknown": b"GET / HTTP/3.7\r\nHost: localhost\r\n\r\n",
    "version_long": b"GET / HTTP/1.111111\r\nHost: localhost\r\n\r\n",
    "http_2_preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
    "tls_hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n",
    "ssh": b"SSH-2.0-OpenSSH_9.0\r\n\r\n",
    "redis": b"*1\r\n$8\r\nFLUSHALL\r\n\r\n",
    "smtp": b"EHLO example\r\n\r\n",
    "zeroes": bytes(10_000) + b"\r\n\r\n",
    "newlines": b"\n" * 10_000 + b"GARBAGE\r\n\r\n",
    "method_bytes": b"G\xffT / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "method_long": b"A" * 100_000 + b" / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "path_bytes": b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "path_control": b"GET /\x01\x02 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "absolute_with_user": b"GET http://a:b@evil/admin/engine HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "authority": b"CONNECT evil:443 HTTP/1.1\r\nHost: evil:443\r\n\r\n",
    "asterisk": b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "http_0_9": b"GET /health\r\n\r\n",
    "upgrade_to_http_2": POST + LENGTH + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n" + BODY,
    "upgrade_to_websocket": GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n",
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_or_foreign_http_is_refused_or_closed(house: House, name: str) -> None:
    reply = send(house, BROKEN[name], half_close=True)
    assert reply.status < 500, reply
    if name.startswith(
        ("length_", "lengths_", "chunks_", "two_lengths", "transfer_s", "chunk_size", "http_2", "redis")
    ):
        assert reply.status in (0, 400), reply  # never taken for a request
    assert_tells_nothing(house, reply)


HALVES = [POST[:10], POST, POST + LENGTH + b"\r\n", POST + LENGTH + b"\r\n" + BODY[:5], chunked(b"5\r\nhe"), GET[:-1]]


@pytest.mark.parametrize("half", HALVES, ids=lambda half: str(len(half)))
def test_half_a_request_is_given_up_when_the_client_leaves(house: House, half: bytes) -> None:
    for how in ("close", "reset"):
        with socket.create_connection(("127.0.0.1", house.port), timeout=TIMEOUT) as connection:
            connection.sendall(half)
            if how == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    assert send(house, GET + b"\r\n").status == 200


def test_client_that_ends_its_side_is_answered_all_the_same(house: House) -> None:
    assert send(house, GET + b"\r\n", half_close=True).status == 200
    reply = send(house, POST + LENGTH + b"\r\n" + BODY, half_close=True)
    assert (reply.status, len(reply.json["choices"])) == (200, 1)


QUIET = 2.0  # seconds


def answers(house: House, data: bytes) -> list[int]:
    """Statuses of everything that comes back until the server closes, or says nothing for a while."""
    with socket.create_connection(("127.0.0.1", house.port), timeout=QUIET) as connection:
        content = b""
        with suppress(ConnectionError, TimeoutError):
            connection.sendall(data)
            while part := connection.recv(2**16):
                content += part
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", content)]


def test_second_request_hidden_in_a_body_is_never_answered(house: House) -> None:
    hidden = b"GET /admin/engine HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer admin-key-of-the-tests\r\n\r\n"
    shapes = [
        POST + b"Content-Length: %d\r\n\r\n" % len(hidden) + hidden,
        POST + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % (5 + len(hidden)) + hidden,
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n" + hidden,
        POST + b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(hidden) + hidden,
        POST + b"Transfer-Encoding: xchunked\r\nContent-Length: %d\r\n\r\n" % len(hidden) + hidden,
    ]
    for shape in shapes:
        assert 200 not in answers(house, shape), shape


def test_garbage_after_a_sound_request_ends_the_connection_after_its_answer(house: House) -> None:
    sound = POST + LENGTH + b"\r\n" + BODY
    assert set(answers(house, sound + b"GARBAGE\r\n\r\n")) <= {200, 400}
    assert answers(house, sound * 5 + b"\x00\xff\r\n\r\n").count(200) <= 5
    assert send(house, GET + b"\r\n").status == 200


def test_many_pipelined_requests_are_answered_in_order_and_bounded(house: House) -> None:
    assert answers(house, (GET + b"\r\n") * 500 + GET + b"Connection: close\r\n\r\n") == [200] * 501
