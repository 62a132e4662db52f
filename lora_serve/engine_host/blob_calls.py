"""Calls from the loaders' threads to the server that has the stores."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future

from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.message import Call
from lora_serve.core.messages import Reply, ReplyValue


class BlobCalls:
    """A thread waits for the answer, which `answered` brings on another."""

    def __init__(self) -> None:
        self._calls: dict[int, Future[ReplyValue]] = {}
        self._call_ids = itertools.count(1)

    def new_id(self) -> int:
        return next(self._call_ids)

    def ask(self, call: Call, send: Callable[[], None], timeout: float | None = None) -> ReplyValue:
        """`send` the call and wait for its answer. Raises the error of a failed call, AdapterUnavailableError."""
        self._calls[call.call_id] = answer = Future[ReplyValue]()
        send()
        try:
            return answer.result(timeout)
        except TimeoutError:
            raise AdapterUnavailableError(
                "The server that has the adapter's files does not answer; try again."
            ) from None
        finally:
            self._calls.pop(call.call_id, None)

    def answered(self, reply: Reply) -> None:
        """Hand a reply to the thread that waits for it, if one still does."""
        call = self._calls.pop(reply.call_id, None)
        if call is None:
            return
        if reply.error is None:
            call.set_result(reply.value)
        else:
            call.set_exception(reply.error)
