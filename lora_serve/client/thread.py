"""The client of an engine in a thread of this process: the default on CPU and in tests."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable

from lora_serve.client.base import MessageClient
from lora_serve.core.errors import EngineLostError, NotReadyError
from lora_serve.core.messages import Stop, ToEngine, ToLoop
from lora_serve.engine.engine import Engine
from lora_serve.engine.loop import EngineLoop, Mail
from lora_serve.engine.queue_gate import QueueGate

_log = logging.getLogger(__name__)
STOP_SECONDS = 20.0  # that the thread may take to end its step


class ThreadEngineClient(MessageClient):
    """See `EngineClient`. The mailbox is shared with the adapter loader, which posts into it."""

    def __init__(
        self,
        engine: Engine,
        mailbox: queue.SimpleQueue[Mail],
        gate: QueueGate,
        rebuild: Callable[[], Engine] | None = None,
    ) -> None:
        """`rebuild`: see `EngineLoop`."""
        super().__init__(gate)
        self._engine = engine
        self._mailbox = mailbox
        self._rebuild = rebuild
        self._thread: threading.Thread | None = None
        self._ended = asyncio.Event()

    async def start(self) -> None:
        """Start the engine's thread; once."""
        assert self._thread is None, "two threads would share one engine"
        loop = asyncio.get_running_loop()
        engine_loop = EngineLoop(
            self._engine,
            self._mailbox,
            lambda messages: loop.call_soon_threadsafe(self._receive, messages),
            self._rebuild,
        )

        def run() -> None:
            try:
                engine_loop.run()
            except BaseException:
                _log.critical("the engine's thread ended", exc_info=True)
            finally:
                loop.call_soon_threadsafe(self._lose)

        self._thread = threading.Thread(target=run, name="engine", daemon=True)
        self._thread.start()

    async def lost(self) -> None:
        """Returns once the thread has ended, by itself or by `stop`."""
        await self._ended.wait()

    async def stop(self) -> None:
        """End the thread after its current step; requests that still run get NotReadyError."""
        if self._thread is not None:
            self._mailbox.put(Stop())
            await asyncio.to_thread(self._thread.join, STOP_SECONDS)
            self._thread = None

    def _send(self, message: ToEngine) -> None:
        assert isinstance(message, ToLoop), "the other messages are for processes"
        if self._thread is None or self._ended.is_set():  # a thread that has ended is alive for a moment more
            raise NotReadyError("The engine is not running.", retry_after=5)
        self._mailbox.put(message)

    def _lose(self) -> None:
        """The thread has ended; open requests and calls get an error."""
        self._ended.set()
        num_lost = self._fail_all(lambda: EngineLostError("The engine stopped; try again.", retry_after=5))
        if num_lost:
            _log.error("%d requests ended with the engine's thread", num_lost)
