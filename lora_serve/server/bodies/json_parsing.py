"""Strict JSON of request bodies, and its errors in words. As a worker (core/worker_processes.py) it parses large ones.

Whoever parses JSON holds Python's lock all the while: a process of its own keeps nobody up. The fields that no route
knows are checked there and dropped. The others are bounded, as nothing slices their validation and release.
"""

from __future__ import annotations

import gc
import pickle
import sys
from array import array
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from lora_serve.core import strict_json
from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.worker_processes import limit_memory, serve

MAX_VALUES = 100_000  # of a large body's fields that are kept, besides token ids
MAX_IDS = 2**23
MEMORY_BYTES = 4 * 2**30  # of a worker; a body of 16 MiB takes 0.6 GiB at most


def parse_json(raw: bytes) -> Any:
    """The value of a body. Raises InvalidRequestError."""
    try:
        return strict_json.parse_json(raw)
    except strict_json.JsonError as error:
        raise InvalidRequestError(f"The request body {error}") from None


def known_fields(raw: bytes, names: Collection[str], id_names: Collection[str]) -> dict[str, Any]:
    """The fields of a large body that are in `names`; token ids in those that are in `id_names` as arrays, of which
    Python's garbage collector, which holds up everybody, looks at no element. Raises InvalidRequestError.
    """
    body = parse_json(raw)
    if not isinstance(body, dict):
        raise InvalidRequestError("The request body must be a JSON object.")
    found = dict[str, Any]()
    num_values = num_ids = 0
    for name in body:
        if name not in names:
            continue
        found[name] = _compact(name, body[name]) if name in id_names else body[name]
        more_values, more_ids = _weigh(found[name])
        num_values, num_ids = num_values + more_values, num_ids + more_ids
        for number, most, kind in ((num_values, MAX_VALUES, "values"), (num_ids, MAX_IDS, "token ids")):
            if number > most:
                raise InvalidRequestError(f"`{name}`: a large request body may hold {most} {kind} at most.", name)
    return found


def _compact(field: str, value: Any) -> Any:
    """The value with lists of integers, and those in a list, as arrays."""
    if not isinstance(value, list):
        return value
    found = _as_array(field, value)
    if isinstance(found, array):
        return found
    return [_as_array(field, item) if isinstance(item, list) else item for item in found]


def _as_array(field: str, value: list[Any]) -> list[Any] | array[int]:
    kinds = set(map(type, value))
    if int not in kinds:
        return value
    if len(kinds) > 1:
        raise InvalidRequestError(f"`{field}` mixes token ids with other values.", field)
    for code in ("H", "I", "q"):  # the shortest, as the server copies them while it holds Python's lock
        with suppress(OverflowError):
            return array(code, value)
    raise InvalidRequestError(f"`{field}` holds an integer that is no token id.", field)


def _weigh(value: Any) -> tuple[int, int]:
    """The number of values in it, itself included, and of integers in arrays; no further than both may be."""
    num_values, num_ids, left = 1, 0, [value]
    while left and num_values <= MAX_VALUES:
        item = left.pop()
        if isinstance(item, array):
            num_ids += len(item)
            continue
        inside = list(item.values()) if isinstance(item, dict) else item
        if isinstance(inside, list):
            num_values += len(inside)
            if num_values <= MAX_VALUES:
                left.extend(one for one in inside if isinstance(one, dict | list | array))
    return num_values, num_ids


def _answer(raw: bytes, names: Collection[str], id_names: Collection[str]) -> bytes:
    """The fields, or the error, pickled."""
    try:
        return pickle.dumps(known_fields(raw, names, id_names))
    except InvalidRequestError as error:
        return pickle.dumps(error)
    except RecursionError:
        return pickle.dumps(InvalidRequestError("The request body is nested too deeply."))
    except MemoryError:
        return pickle.dumps(InvalidRequestError("The request body holds more values than there may be."))


if __name__ == "__main__":
    gc.disable()  # what is parsed has no circles
    known, of_ids = (frozenset(text.split(",")) for text in sys.argv[1:])
    serve(lambda job: _answer(job, known, of_ids), lambda: limit_memory(MEMORY_BYTES))
