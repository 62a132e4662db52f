"""The JSON of request bodies: a large one is what a small one is, and both are what Python's own reader says."""

from __future__ import annotations

import json
from collections.abc import Iterator

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.json_body import parse_json
from lora_serve.server.json_parsing import known_fields
from tests.fuzz.mutating import within, written

ERRORS = (InvalidRequestError,)
NAMES = frozenset(("model", "prompt"))


def fuzz(data: bytes) -> None:
    """The body alone."""
    whole = parse_json(data)
    assert repr(whole) == repr(json.loads(data))
    some = known_fields(data, NAMES, ())
    assert repr(some) == repr({name: item for name, item in whole.items() if name in NAMES})
    known_fields(data, NAMES, NAMES)


def seeds() -> Iterator[bytes]:
    body = {
        "model": "a",
        "messages": [{"role": "user", "content": 'é😀\n\u0001"'}],
        "n": 1,
        "x": [[1, [2.5, {}]], None, True],
    }
    yield written(body)
    yield json.dumps(body, ensure_ascii=False, indent=1).encode()
    yield written({"prompt": list(range(200)), "model": "a" * 300})
    yield b'{"a": ' + b"[" * 60 + b"]" * 60 + b"}"
    yield b'{"a": 1, "a": "\\ud83d\\ude00", "b": "\\ud83d"}'
    yield b'{"a": NaN}'
    yield b'{"a": [1, [2, [3, [4, [5, [6 7]]]]]]}'
    yield b'{"a": 1e999, "b": 123456789012345678901234567890}'
    yield b"[]"


mutate = within(json.loads, written, ("model", "prompt"))
