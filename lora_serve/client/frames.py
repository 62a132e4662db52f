"""Records as frames on a stream socket: a length of four bytes, big-endian, then MessagePack."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from lora_serve.client.record import Record
from lora_serve.client.wire import FromEngine, ToEngine

MAX_FRAME_BYTES = 2**30
_HEAD = 4


def _encode_other(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot cross between processes")


def _decode_other(kind: type, value: Any) -> Any:
    if issubclass(kind, Path):
        return Path(value)
    raise TypeError(f"{kind.__name__} cannot cross between processes")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine, dec_hook=_decode_other)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine, dec_hook=_decode_other)


def frame_of(record: Record) -> bytes:
    """The record as it goes over the socket."""
    body = _encoder.encode(record)
    return len(body).to_bytes(_HEAD, "big") + body


def to_engine(frame: bytes | bytearray | memoryview) -> ToEngine:
    """Raises msgspec.DecodeError for what is no such record."""
    return _to_engine.decode(frame)


def from_engine(frame: bytes | bytearray | memoryview) -> FromEngine:
    """Raises msgspec.DecodeError for what is no such record."""
    return _from_engine.decode(frame)


class FrameSplitter:
    """Bytes as they come, cut into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that `data` completes, without their lengths. Raises ValueError for a length beyond all sense."""
        self._buffer += data
        start = 0
        try:
            while (end := self._end(start)) is not None:
                yield bytes(self._buffer[start + _HEAD : end])
                start = end
        finally:
            del self._buffer[:start]

    def _end(self, start: int) -> int | None:
        """Where the frame that begins at `start` ends; None: not all of it is here."""
        if len(self._buffer) < start + _HEAD:
            return None
        length = int.from_bytes(self._buffer[start : start + _HEAD], "big")
        if length > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {length} bytes")
        end = start + _HEAD + length
        return end if end <= len(self._buffer) else None
