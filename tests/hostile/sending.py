"""Requests as no client library would make them, and what every refusal must look like."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tests.canary.house import ADMIN, House

TIMEOUT = 60  # seconds


@dataclass(frozen=True)
class Reply:
    """Of a server to one request; status 0: it closed without a word."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def send(house: House, data: bytes, *, half_close: bool = False) -> Reply:
    """Bytes to the socket as they are; the first answer to them."""
    with socket.create_connection(("127.0.0.1", house.port), timeout=TIMEOUT) as connection:
        answer = http.client.HTTPResponse(connection, method=data[:4].decode("latin-1").strip())
        try:
            with suppress(ConnectionError):  # it need not read to the end before it answers
                connection.sendall(data)
                if half_close:
                    with suppress(OSError):  # it may have closed already, and has answered
                        connection.shutdown(socket.SHUT_WR)
            answer.begin()
            return Reply(answer.status, dict(answer.getheaders()), answer.read())
        except (http.client.HTTPException, ConnectionError, ValueError):
            return Reply(0, {}, b"")
        finally:
            answer.close()


def call(
    house: House, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> Reply:
    """A sound request; `path` goes over the wire as it is."""
    content = body or b""
    named = {"Host": "localhost", "Connection": "close", "Content-Length": str(len(content)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    return send(house, f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + content)


def post(house: House, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Reply:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return call(house, "POST", path, raw, {"Content-Type": "application/json", **ADMIN, **(headers or {})})


def as_admin(house: House, method: str, path: str, body: Any = None, **headers: str) -> Reply:
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    kind = {} if body is None else {"Content-Type": "application/json"}
    return call(house, method, path, raw, {**kind, **ADMIN, **headers})


def assert_refused(house: House, reply: Reply, statuses: int | Collection[int]) -> None:
    """A planned 4xx in OpenAI's form that tells nothing of this machine."""
    planned = {statuses} if isinstance(statuses, int) else set(statuses)
    assert reply.status in planned, (reply.status, reply.body[:500])
    assert_tells_nothing(house, reply)
    if reply.status >= 400 and "json" in reply.headers.get("Content-Type", ""):
        error = reply.json["error"]
        assert {"message", "type", "param", "code"} == set(error) - {"reasons"}
        assert "reasons" not in error or (reply.status == 422 and all(error["reasons"]))
        assert 0 < len(error["message"]) < 9000


def assert_tells_nothing(house: House, reply: Reply) -> None:
    assert b"Traceback" not in reply.body
    assert b'File "' not in reply.body
    for path in (house.store, house.settings.model, *house.settings.adapter_root):
        assert str(path).encode() not in reply.body
    assert "aiohttp" not in reply.headers.get("Server", "").lower()
