"""The JSON of request bodies: read in slices it is what it is in one go, and both are what Python's own reader says."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator
from typing import Any, cast

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.bodies.json_parsing import parse_json
from lora_serve.server.bodies.sliced_json import SlicedObject
from tests.fuzz.mutating import within, written

ERRORS = (InvalidRequestError,)
NAMES = ("model", "prompt")
HALF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


class AllNames:
    """Every field is known."""

    def __contains__(self, name: object) -> bool:
        return True


def fuzz(data: bytes) -> None:
    """The first byte is the size of a slice."""
    size, raw = 16 + (data or b"\0")[0], data[1:]
    sliced, whole = _outcome(raw, size), _outcome(raw, None)
    # Of two fields of one name, a reader in slices looks for halves of pairs in the one that does not count, too.
    if not (HALF_A_PAIR.search(raw) and isinstance(sliced, InvalidRequestError)):
        assert type(sliced) is type(whole), (sliced, whole)
        assert isinstance(whole, InvalidRequestError) or repr(sliced) == repr(whole)
    some = _outcome(raw, size, NAMES)
    if isinstance(whole, dict) and isinstance(some, dict):
        assert repr(some) == repr({name: item for name, item in whole.items() if name in ("model", "prompt")})
    if isinstance(whole, InvalidRequestError):
        raise whole
    assert repr(whole) == repr(json.loads(raw))


def _outcome(raw: bytes, size: int | None, names: Container[str] = AllNames()) -> Any:
    try:
        value = parse_json(raw) if size is None else SlicedObject(raw, cast("Any", names), size=size).read()
    except InvalidRequestError as error:
        return error
    return value if isinstance(value, dict) else InvalidRequestError("no object")


def seeds() -> Iterator[bytes]:
    body = {
        "model": "a",
        "messages": [{"role": "user", "content": 'é😀\n\u0001"'}],
        "n": 1,
        "x": [[1, [2.5, {}]], None, True],
    }
    yield b"\x00" + written(body)
    yield b"\x08" + json.dumps(body, ensure_ascii=False, indent=1).encode()
    yield b"\xff" + written({"prompt": list(range(200)), "model": "a" * 300})
    yield b"\x00" + b'{"a": ' + b"[" * 60 + b"]" * 60 + b"}"
    yield b"\x00" + b'{"a": 1, "a": "\\ud83d\\ude00", "b": "\\ud83d"}'
    yield b"\x01" + b'{"a": NaN}'
    yield b"\x01" + b'{"a": [1, [2, [3, [4, [5, [6 7]]]]]]}'
    yield b"\x01" + b'{"a": 1e999, "b": 123456789012345678901234567890}'
    yield b"\x01" + b"[]"


mutate = within(
    lambda data: [data[0], json.loads(data[1:])],
    lambda tree: bytes([int(tree[0]) % 256]) + written(tree[1]),
    ("model", "prompt"),
)
