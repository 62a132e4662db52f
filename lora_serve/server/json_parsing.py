"""Large JSON bodies, parsed by a worker (core/worker_processes.py): strictly, and with errors in words.

Parsing holds Python's lock all the while, which a process of its own does not. The fields that no route
knows are checked there and dropped. The others are bounded, as nothing slices their validation and release.
"""

from __future__ import annotations

import gc
import sys
from array import array
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import msgspec

from lora_serve.core import strict_json
from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.worker_processes import limit_memory, serve

MAX_VALUES = 100_000  # of a large body's fields that are kept, besides token ids
MAX_IDS = 2**23
_TOO_DEEP = "The request body is nested too deeply."
MEMORY_BYTES = 4 * 2**30  # of a worker; a body of 16 MiB takes 0.6 GiB at most


def known_fields(raw: bytes, names: Collection[str], id_names: Collection[str]) -> dict[str, Any]:
    """The fields of a large body that are in `names`; token ids in those that are in `id_names` as arrays, of which
    Python's garbage collector, which holds up everybody, looks at no element. Raises InvalidRequestError.
    """
    try:
        body = strict_json.parse_json(raw)
    except strict_json.JsonError as error:
        raise InvalidRequestError(f"The request body {error}") from None
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


def fields_of(answer: bytes) -> dict[str, Any]:
    """The fields of a worker's answer. Raises InvalidRequestError if it refused the body."""
    try:
        fields, *refusal = _decoder.decode(answer)
    except RecursionError:
        fields, refusal = None, [_TOO_DEEP]
    if refusal:
        raise InvalidRequestError(*refusal)
    return fields  # type: ignore[no-any-return]


def _answer(raw: bytes, names: Collection[str], id_names: Collection[str]) -> bytes:
    """The fields, or nothing, the error's words and the field that it names."""
    try:
        fields = known_fields(raw, names, id_names)
        try:
            return _encoder.encode((fields,))
        except OverflowError:
            return _encoder.encode((_spelled(fields),))
    except InvalidRequestError as error:
        return _encoder.encode((None, str(error), error.param))
    except RecursionError:
        return _encoder.encode((None, _TOO_DEEP))
    except MemoryError:
        return _encoder.encode((None, "The request body holds more values than there may be."))


def _spelled(value: Any) -> Any:
    """The value, with integers of more than 64 bits, which msgpack lacks, as their digits."""
    match value:
        case dict():
            return {name: _spelled(item) for name, item in value.items()}
        case list():
            return [_spelled(item) for item in value]
        case int() if not -(2**63) <= value < 2**64:
            return msgspec.msgpack.Ext(_DIGITS, str(value).encode())
    return value


def _read_extension(code: int, data: memoryview) -> int | array[int]:
    return int(bytes(data)) if code == _DIGITS else array(chr(code), bytes(data))


_DIGITS = 0  # of msgpack's extensions; those of arrays are their type codes
_encoder = msgspec.msgpack.Encoder(enc_hook=lambda ids: msgspec.msgpack.Ext(ord(ids.typecode), ids.tobytes()))
_decoder = msgspec.msgpack.Decoder(ext_hook=_read_extension)

if __name__ == "__main__":
    gc.disable()  # what is parsed has no circles
    known, of_ids = (frozenset(text.split(",")) for text in sys.argv[1:])
    serve(lambda job: _answer(job, known, of_ids), lambda: limit_memory(MEMORY_BYTES))
