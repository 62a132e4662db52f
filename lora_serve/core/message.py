"""The base of all messages between the server's event loop and an engine: see `messages.py`."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The base of all messages and of the commands in them; the types of the fields are checked by the decoder."""


class Call(Message, frozen=True):
    """The base of every message that is answered by a `Reply` of the same id."""

    call_id: int  # unique among the calls of one side
