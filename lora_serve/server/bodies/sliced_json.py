"""Reads a large JSON object in slices, so that the thread that reads it never holds the GIL for long.

Each slice is parsed by `parse_json`, so a large body is refused for the same reasons as a small one; lists and objects
larger than a slice are put together here. Fields that no route knows are checked and dropped, slice by slice. The
others are bounded, as nothing slices their validation and release. Lists of token ids become arrays.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.bodies.json_parsing import no_json, parse_json, too_deep
from lora_serve.server.bodies.json_scan import SLICE, Level, cut, look, whole_elements

MAX_VALUES = 100_000  # of the fields that are kept, besides token ids
MAX_IDS = 2**23
MAX_DIGITS = 2**20  # characters of a number
_SHORT_LOOK = 8  # part of a slice that is looked at first: a look takes a moment for each bracket
MAX_OPEN = 500  # lists and objects inside one another, each larger than a slice
_BLANKS = re.compile(rb"[ \t\r\n]*+")
_SCALAR = re.compile(rb'[^\s,:"\[\]{}]++')
_TEXT = re.compile(  # of a string: no half of a character that is written as two escapes
    rb'(?:[^"\\]++|\\[^u]|\\u(?:[^dD"\\][^"\\]{3}|[dD][^89abAB"\\][^"\\]{2}|[dD][89abAB][^"\\]{2}\\u[dD][c-fC-F][^"\\]{2}))*+',
    re.DOTALL,
)


class UnwantedError(Exception):
    """The request is gone, so nobody waits for the value any more."""


def compact(value: Any) -> Any:
    """The value with lists of integers, and those in a list, as arrays: Python's garbage collector, which holds up
    everybody, looks at every element of a list but not of an array. Raises OverflowError.
    """
    if not isinstance(value, list):
        return value
    if set(map(type, value)) == {int}:
        return array("q", value)
    return [array("q", item) if isinstance(item, list) and set(map(type, item)) == {int} else item for item in value]


def weigh(value: Any) -> tuple[int, int]:
    """The number of values in it, itself included, and of integers in arrays."""
    num_values, num_ids, left = 1, 0, [value]
    while left:
        item = left.pop()
        if isinstance(item, array):
            num_ids += len(item)
            continue
        inside = list(item.values()) if isinstance(item, dict) else item
        if isinstance(inside, list):
            num_values += len(inside)
            left.extend(one for one in inside if isinstance(one, dict | list | array))
    return num_values, num_ids


@dataclass(slots=True)
class _Open:
    """A list or object whose end has not been reached."""

    value: list[Any] | dict[str, Any] | array[int]
    is_kept: bool
    field: str = ""  # of the body, to which the value belongs
    name: str = ""  # in the object around it
    after_element: bool = False  # a comma or the end must follow
    after_comma: bool = False  # an element must follow

    @property
    def brackets(self) -> bytes:
        return b"{}" if isinstance(self.value, dict) else b"[]"


class SlicedObject:
    """The reader of one body. `read` is called on a thread."""

    def __init__(self, raw: bytes, names: Collection[str], id_names: Collection[str] = (), size: int = SLICE) -> None:
        """`names`: the fields to keep. `id_names`: those of them that may hold token ids. `size`: bytes of a slice."""
        self._raw = raw
        self._id_names = id_names
        self._size = size
        self._names = names
        self._at = 0
        self._open: list[_Open] = []
        self._num_values: dict[str, int] = {}  # kept, by field
        self._num_ids: dict[str, int] = {}
        self._is_wanted = True

    def stop(self) -> None:
        """Make `read` end soon, as nobody wants the value. May be called from any thread."""
        self._is_wanted = False

    def read(self) -> dict[str, Any]:
        """The body. Raises InvalidRequestError, UnwantedError."""
        self._skip_blanks()
        if self._raw[self._at : self._at + 1] != b"{":
            raise InvalidRequestError("The request body must be a JSON object.")
        root = dict[str, Any]()
        self._enter(_Open(root, True))
        while self._open:
            if not self._is_wanted:
                raise UnwantedError
            self._step()
        self._skip_blanks()
        if self._at < len(self._raw):
            raise no_json(f"Extra data from byte {self._at}")
        return root

    def _step(self) -> None:
        """Read the next slice of the innermost list or object."""
        inner = self._open[-1]
        self._skip_blanks()
        if inner.after_element:
            self._comma_or_end(inner)
            return
        end = min(self._at + self._size, len(self._raw))
        whole = whole_elements(self._raw, self._at, end)
        if whole - self._at > self._size // 2:
            self._add(inner, self._at, whole - 1)
            self._at, inner.after_comma = whole, True
            return
        stop = min(self._at + self._size // _SHORT_LOOK, end)
        window = look(self._raw, self._at, stop)
        if window.closed_at is None and len(window.levels) == 1:  # no list or object to go on in
            stop = end
            window = look(self._raw, self._at, stop)
        if window.closed_at is not None:
            self._close(inner, window.closed_at)
            return
        self._enter_all(window.levels, stop)

    def _comma_or_end(self, inner: _Open) -> None:
        found = self._raw[self._at : self._at + 1]
        if found == b",":
            inner.after_element, inner.after_comma = False, True
            self._at += 1
        elif found == inner.brackets[1:]:
            self._leave()
        else:
            raise self._wrong("Expecting ',' delimiter")

    def _close(self, inner: _Open, end: int) -> None:
        """Read the rest of the list or object, which ends at `end`."""
        if self._raw[end] != inner.brackets[1]:
            raise self._wrong("Brackets that do not match")
        if self._raw[self._at : end].strip(b" \t\r\n"):
            self._add(inner, self._at, end)
        elif inner.after_comma:
            raise self._wrong("Expecting value")
        self._at = end
        self._leave()

    def _enter_all(self, levels: list[Level], end: int) -> None:
        """Add the whole elements of each level, and at least one of the innermost."""
        for level, following in itertools.pairwise(levels):
            bracket = following.start - 1
            inner = self._open[-1]
            rest = self._add_whole(inner, level, bracket)
            if inner.after_element:
                raise self._wrong("Expecting ',' delimiter")
            self._enter_child(inner, rest, bracket)
        inner, last = self._open[-1], levels[-1]
        self._at = self._add_whole(inner, last, end)
        if len(levels) == 1 and self._at == last.start:
            self._read_one(inner)

    def _add_whole(self, inner: _Open, level: Level, end: int) -> int:
        """Add the whole elements of a level. Returns where the rest begins."""
        stop, rest = cut(self._raw, level, end)
        if rest > level.start:
            self._add(inner, level.start, stop)
            inner.after_element, inner.after_comma = stop == rest, stop < rest
        return rest

    def _enter_child(self, inner: _Open, start: int, bracket: int) -> None:
        """Enter a list or object at `bracket`. `start`: where its name begins, in an object."""
        before = self._raw[start:bracket]
        name = ""
        if isinstance(inner.value, dict):
            (name,) = self._parsed(b"{" + before + b"null}", start)
        elif before.strip(b" \t\r\n"):
            raise self._wrong("Expecting ',' delimiter")
        self._enter_under(inner, name, bracket)

    def _enter_under(self, inner: _Open, name: str, bracket: int) -> None:
        field = inner.field if len(self._open) > 1 else name
        is_kept = inner.is_kept and (len(self._open) > 1 or name in self._names)
        if is_kept and len(self._open) == 1:
            self._num_values[field] = self._num_ids[field] = 0
        self._at = bracket
        self._enter(_Open([] if self._raw[bracket : bracket + 1] == b"[" else {}, is_kept, field, name))

    def _enter(self, opened: _Open) -> None:
        if len(self._open) == MAX_OPEN:
            raise too_deep()
        self._open.append(opened)
        self._at += 1

    def _leave(self) -> None:
        left = self._open.pop()
        self._at += 1
        if self._open:
            self._put(self._open[-1], left.name, left.value, left.is_kept)

    def _read_one(self, inner: _Open) -> None:
        """Read an element that is larger than a slice, or the rest of a body that is cut short."""
        name = ""
        if isinstance(inner.value, dict):
            name = self._read_text(True)
            self._skip_blanks()
            if self._raw[self._at : self._at + 1] != b":":
                raise self._wrong("Expecting ':' delimiter")
            self._at += 1
            self._skip_blanks()
        is_kept = inner.is_kept and (len(self._open) > 1 or name in self._names)
        start = self._raw[self._at : self._at + 1]
        if start in (b"[", b"{"):
            self._enter_under(inner, name, self._at)
        elif start == b'"':
            self._put(inner, name, self._read_text(is_kept), is_kept)
        else:
            self._put(inner, name, self._read_scalar(), is_kept)

    def _put(self, inner: _Open, name: str, value: Any, is_kept: bool) -> None:
        """Add one parsed element."""
        if is_kept:
            if isinstance(inner.value, dict):
                inner.value[name] = value
                self._charge(inner.field or name, 1, 0)
            elif isinstance(value, int):
                self._extend(inner, self._taken(inner.field, [value]))
            else:
                self._extend(inner, [value])
                self._charge(inner.field, 1, 0)
        inner.after_element, inner.after_comma = True, False

    def _add(self, inner: _Open, start: int, end: int) -> None:
        """Parse and add whole elements, with the commas between them."""
        found = self._parsed(b"%c%b%c" % (inner.brackets[0], self._raw[start:end], inner.brackets[1]), start)
        if not found:
            raise self._wrong("Expecting value")
        if not inner.is_kept:
            return
        if not isinstance(inner.value, dict):
            self._extend(inner, self._taken(inner.field, found))
            return
        for name, value in found.items():
            if len(self._open) > 1:
                inner.value[name] = value
                self._charge(inner.field, *weigh(value))
            elif name in self._names:
                self._num_values[name] = self._num_ids[name] = 0
                inner.value[name] = self._taken(name, value)

    def _extend(self, inner: _Open, found: list[Any] | array[int]) -> None:
        """Add to a list; one that mixes token ids with other values is refused at once."""
        if isinstance(found, array) and not inner.value:
            inner.value = array("q")
        assert not isinstance(inner.value, dict), "an object's elements have names"
        if isinstance(found, array) is not isinstance(inner.value, array):
            raise InvalidRequestError(f"`{inner.field}` mixes token ids with other values.", inner.field)
        inner.value.extend(found)

    def _taken(self, field: str, value: Any) -> Any:
        """The value in the form in which it is kept, counted against the limits."""
        if field in self._id_names:
            try:
                value = compact(value)
            except OverflowError:
                raise InvalidRequestError(f"`{field}` holds an integer that is no token id.", field) from None
        self._charge(field, *weigh(value))
        return value

    def _charge(self, field: str, num_values: int, num_ids: int) -> None:
        self._num_values[field] = self._num_values.get(field, 0) + num_values
        self._num_ids[field] = self._num_ids.get(field, 0) + num_ids
        if sum(self._num_values.values()) > MAX_VALUES:
            raise InvalidRequestError(f"`{field}`: a large request body may hold {MAX_VALUES} values at most.", field)
        if sum(self._num_ids.values()) > MAX_IDS:
            raise InvalidRequestError(f"`{field}`: a large request body may hold {MAX_IDS} token ids at most.", field)

    def _read_scalar(self) -> Any:
        found = _SCALAR.match(self._raw, self._at, self._at + MAX_DIGITS + 1)
        if found is None:
            raise self._wrong("Expecting value")
        if found.end() - self._at > MAX_DIGITS:
            raise self._wrong(f"A number of more than {MAX_DIGITS} characters")
        value = self._parsed(found.group(), self._at)
        self._at = found.end()
        return value

    def _read_text(self, is_kept: bool) -> str:
        """Read a string, parsing a part at a time."""
        if self._raw[self._at : self._at + 1] != b'"':
            raise self._wrong("Expecting a string")
        self._at += 1
        parts: list[str] = []
        while self._raw[self._at : self._at + 1] != b'"':
            if not self._is_wanted:
                raise UnwantedError
            end = self._end_of_part()
            part = self._parsed(b'"' + self._raw[self._at : end] + b'"', self._at)
            if is_kept:
                parts.append(part)
            self._at = end
        self._at += 1
        return "".join(parts)

    def _end_of_part(self) -> int:
        found = _TEXT.match(self._raw, self._at, min(self._at + self._size, len(self._raw)))
        end = self._at if found is None else found.end()
        while end > self._at and end < len(self._raw) and self._raw[end] & 0xC0 == 0x80:  # inside a character of UTF-8
            end -= 1
        if end == self._at:  # an escape that is none, or has no other half
            end = self._at + 6
        if end >= len(self._raw):
            raise self._wrong("Unterminated string")
        return end

    def _parsed(self, text: bytes, start: int) -> Any:
        try:
            return parse_json(text)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{error} (of the part from byte {start})") from None

    def _skip_blanks(self) -> None:
        while True:
            found = _BLANKS.match(self._raw, self._at, self._at + self._size)
            if found is None or found.end() == self._at:
                return
            self._at = found.end()

    def _wrong(self, reason: str) -> InvalidRequestError:
        return no_json(f"{reason} at byte {self._at}")
