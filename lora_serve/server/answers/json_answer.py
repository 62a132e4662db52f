"""Answers in JSON that may be large: made and written on a thread, and there in slices.

A call into Python's own writer, and the release of what it wrote, keep every other thread waiting until they end.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

from aiohttp import web

from lora_serve.server.background.tasks import LONG

_GROUP = 8  # elements
_SINGLE = frozenset((int, float, bool, type(None)))
_HOLDERS = (dict, list, tuple)
_SMALL = 2_000  # values, or a 32nd of their characters, that are written at once
_TEXT_SLICE = 2**16  # characters
PIECE = 2**18  # bytes that are sent at once

Encode = Callable[[Any], str]
encode_answer = functools.partial(json.dumps, default=list)  # of iterators


async def json_answer(request: web.Request, make: Callable[[], Any], length: int) -> web.StreamResponse:
    """Answer with the value that `make` returns; a large one is emptied while it is written, so nobody else may
    hold it. `length`: of the answer, in the units of LONG.
    """
    if length <= LONG:
        return web.json_response(make(), dumps=encode_answer)
    pieces = await asyncio.to_thread(lambda: _pieces(written(make())))
    response = web.StreamResponse(headers={"Content-Type": "application/json; charset=utf-8"})
    response.content_length = sum(map(len, pieces))
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
        await asyncio.sleep(0)  # a fast reader takes megabytes, and others would wait for the last of them
    await response.write_eof()
    return response


def written(value: Any, encode: Encode = encode_answer) -> Iterator[str]:
    """The value as JSON, part by part; lists and objects give up what is written."""
    if isinstance(value, str):
        yield from _text(value, encode)
    elif _is_small(value):
        yield encode(value)
    elif isinstance(value, dict):
        before = "{"
        for name in list(value):
            yield f"{before}{encode(name)}: "
            yield from written(value.pop(name), encode)
            before = ", "
        yield "}"
    else:
        yield from _list(_emptied(value) if isinstance(value, list) else iter(value), encode)


def _emptied(value: list[Any]) -> Iterator[Any]:
    for index, item in enumerate(value):
        value[index] = None
        yield item


def _list(value: Iterator[Any], encode: Encode) -> Iterator[str]:
    before = "["
    while group := list(itertools.islice(value, _GROUP)):
        if _is_small(group):
            yield before + encode(group)[1:-1]
            before = ", "
            continue
        while group:
            yield before
            yield from written(group.pop(0), encode)
            before = ", "
    yield "]" if before == ", " else "[]"


def _text(value: str, encode: Encode) -> Iterator[str]:
    yield '"'
    for start in range(0, len(value), _TEXT_SLICE):
        yield encode(value[start : start + _TEXT_SLICE])[1:-1]
    yield '"'


def _is_small(value: Any) -> bool:
    left: list[Any] = [(value,)]
    weight = 0
    while left:  # only what holds others is put there: a page of cards has a hundred thousand values
        item = left.pop()
        if not isinstance(item, _HOLDERS):
            if isinstance(item, Iterator):
                return False
            continue
        if (weight := weight + 2 * len(item)) > _SMALL:
            return False
        for part in item.values() if isinstance(item, dict) else item:
            kind = type(part)
            if kind is str:
                weight += len(part) // 32
            elif kind not in _SINGLE:
                left.append(part)
    return weight <= _SMALL


def _pieces(parts: Iterator[str]) -> list[bytes]:
    """The parts joined into pieces that are worth a call each."""
    pieces, held, num_held = list[bytes](), list[str](), 0
    for part in parts:
        held.append(part)
        num_held += len(part)
        if num_held >= PIECE:
            pieces.append("".join(held).encode())
            held, num_held = [], 0
    return [*pieces, "".join(held).encode()]
