"""Large bodies mean what small ones mean, and are refused for the same reasons."""

from __future__ import annotations

import gc
import json
import threading
import time
from array import array
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.bodies.json_parsing import parse_json
from lora_serve.server.bodies.sliced_json import MAX_OPEN, MAX_VALUES, SlicedObject, UnwantedError
from lora_serve.server.schemas.known import known_names
from tests.attempts import in_some_attempt

SIZES = st.sampled_from([16, 17, 23, 64, 200])  # of a slice; a pair of escapes has twelve bytes
REFUSED = "refused"
TEXTS = st.text(st.sampled_from('ab"\\[]{},: \n\u0001é漢😀')) | st.text(max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=30,
)
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=5)
EDITS = st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from([b"", *(bytes([c]) for c in b'[]{},":\\u 1aD\xc3')])))


class AllNames:
    """Every field is known."""

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


def sliced(raw: bytes, size: int) -> Any:
    try:
        return SlicedObject(raw, AllNames(), size=size).read()
    except InvalidRequestError:
        return REFUSED


def whole(raw: bytes) -> Any:
    try:
        value = parse_json(raw)
    except InvalidRequestError:
        return REFUSED
    return value if isinstance(value, dict) else REFUSED


def edited(raw: bytes, edits: list[tuple[int, bytes]]) -> bytes:
    for where, byte in edits:
        at = where % (len(raw) + 1)
        raw = raw[:at] + byte + raw[at + (not byte) :]
    return raw


@given(OBJECTS, st.booleans(), st.sampled_from([None, 1]), EDITS, SIZES)
@example({"a": [1, [2], 3]}, True, None, [(8, b",")], 16)
def test_any_text_is_read_as_it_is_in_one_go(
    value: dict[str, Any], is_ascii: bool, indent: int | None, edits: list[tuple[int, bytes]], size: int
) -> None:
    raw = edited(json.dumps(value, ensure_ascii=is_ascii, indent=indent).encode(), edits[:3])
    expected, found = whole(raw), sliced(raw, size)
    if b"\\ud" in raw.lower() and found == REFUSED:
        return  # of two fields of one name, only the one that counts was looked at for halves of a pair
    assert found == expected, raw


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a": [1 2]}', b'{"a": [1,]}', b'{"a": [,1]}', b'{"a": 1,}', b'{"a" 1}', b'{"a": [1}', b'{"a": {"b": 1]}',
        b'{"a": "\\u12"}', b'{"a": "\\ud800"}', b'{"a": "\\udc00\\ud800"}', b'{"a": "\xff"}', b'{"a": "\n"}',
        b'{"a": NaN}', b'{"a": 1e999}', b'{"a": 1}}', b'{"a": 1} {}', b'{"a": [[1] [2]]}', b'{"a": 01}', b'{"a": "',
        b'{"a": ', b"[1]", b'\xef\xbb\xbf{"a": 1}', b'{"a": [1, [2, [3, [4, [5, [6 7]]]]]]}',
    ],
)  # fmt: skip
def test_what_is_no_json_is_refused_wherever_it_is_cut(raw: bytes) -> None:
    assert whole(raw) == REFUSED
    for blanks in range(1, 70):
        assert sliced(raw.replace(b" ", b" " * blanks), 16) == REFUSED


def test_unknown_fields_are_ignored_however_many_they_are() -> None:
    raw = b"{" + b"".join(b'"k%d": [[], {"a": "x"}],' % number for number in range(100_000)) + b'"prompt": "x"}'
    assert SlicedObject(raw, known_names()).read() == {"prompt": "x"}
    deep = b'{"junk": [' + b"[" * 40 + b"1, " * 200_000 + b"1" + b"]" * 40 + b'], "prompt": "y"}'
    assert SlicedObject(deep, known_names()).read() == {"prompt": "y"}


def test_unknown_fields_are_checked_all_the_same() -> None:
    for junk in (b"[" + b"1, " * 50_000 + b"1e999]", b'"' + b"a" * 100_000 + b'\\ud800"', b"[" * 100_000):
        with pytest.raises(InvalidRequestError):
            SlicedObject(b'{"junk": ' + junk + b', "prompt": "x"}', known_names()).read()


def test_known_fields_hold_so_many_values_and_no_more() -> None:
    for one in (b'{"role": "user"}', b'"a"', b"[]", b"1"):
        body = b'{"messages": [' + one + (b"," + one) * MAX_VALUES + b"]}"
        with pytest.raises(InvalidRequestError, match="`messages`: a large request body"):
            SlicedObject(body, known_names()).read()
    twice = b'"stop": [1' + b",1" * 90_000 + b"]"
    assert len(SlicedObject(b"{" + twice + b"," + twice + b"}", known_names()).read()["stop"]) == 90_001


def test_token_ids_are_kept_as_numbers() -> None:
    ids = b",".join(b"%d" % number for number in range(300_000))
    found = SlicedObject(b'{"prompt": [' + ids + b"]}", known_names(), ("prompt",)).read()["prompt"]
    assert isinstance(found, array)
    assert found == array("q", range(300_000))
    lists = SlicedObject(b'{"prompt": [[' + ids + b'], [5, 6], ["a"]]}', known_names(), ("prompt",)).read()["prompt"]
    assert [type(item) for item in lists] == [array, array, list]
    for other in (b'"a"', b"1.5", b"[1]", b"9" * 30):
        for mixed in (ids + b"," + other, other + b"," + ids):
            with pytest.raises(InvalidRequestError, match="token id"):
                SlicedObject(b'{"prompt": [' + mixed + b"]}", known_names(), ("prompt",)).read()


def test_nesting_has_an_end() -> None:
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        deep = b'{"a": ' + opening * 10**6 + b"1" + closing * 10**6 + b"}"
        with pytest.raises(InvalidRequestError, match="too deeply"):
            SlicedObject(deep, known_names()).read()
    filling = b'"' + b"a" * 70_000 + b'"'
    wide = b'{"x": ' + b"[" * (MAX_OPEN - 2) + filling + b"]" * (MAX_OPEN - 2) + b"}"
    assert SlicedObject(wide, ("x",)).read()["x"]


def test_reader_whose_client_has_left_ends() -> None:
    reader = SlicedObject(b'{"x": [' + b"[]," * 4_000_000 + b"1]}", known_names())
    ended = threading.Event()

    def read() -> None:
        with pytest.raises(UnwantedError):
            reader.read()
        ended.set()

    thread = threading.Thread(target=read)
    thread.start()
    reader.stop()
    thread.join(10)
    assert ended.is_set()


@pytest.mark.parametrize("part", [b"1,", b"[],", b'"\\n",', b'{"a":1},', b"[[[[[1]]]]],"])
def test_no_part_of_a_large_body_takes_long(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of processor time: calls into C, during which nobody else runs, are a slice each."""
    raw = b'{"x":[' + part * (2**22 // len(part)) + b"1]}"
    seconds: list[float] = []
    plain = SlicedObject._step

    def step(reader: SlicedObject) -> None:
        started = time.thread_time()
        plain(reader)
        seconds.append(time.thread_time() - started)

    def read() -> None:
        seconds.clear()
        SlicedObject(raw, known_names()).read()
        assert max(seconds) < 0.05

    monkeypatch.setattr(SlicedObject, "_step", step)
    gc.collect()
    gc.freeze()  # the tests' own objects
    in_some_attempt(read)
