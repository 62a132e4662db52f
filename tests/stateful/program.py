"""The whole program on a thread of this process: its own wiring, catalog and stores; only the model is ours."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from lora_serve.app import launch
from lora_serve.core.settings import Settings
from lora_serve.engine_host.hosts import thread
from lora_serve.model.build import ModelParts
from lora_serve.server.sockets.listener import bound_socket
from tests.e2e.plain_http import Reply
from tests.stateful.letters import BLOCK_SIZE, TEXT, LetterRunner, letter_parts

BASE, KEY = "base", "admin-key-of-the-tests"
PATIENCE = 60.0  # seconds for what must happen some time
_here: contextvars.ContextVar[Program] = contextvars.ContextVar("program")  # whose wiring runs here


class Program:
    """One server over a store folder; it can be stopped and started again."""

    def __init__(self, store: Path, root: Path, max_loras: int, redis_url: str | None, redis_prefix: str) -> None:
        self.store = store
        self.held: set[int] = set()  # seeds of answers that go on until they are taken out
        self.runner = LetterRunner(self.held)
        self.settings = Settings(
            model="letters",
            served_model_name=BASE,
            store=store,
            adapter_root=(root,),
            admin_key=KEY,
            warmup="off",
            max_loras=max_loras,
            max_cpu_loras=max_loras + 1,
            block_size=BLOCK_SIZE,
            redis_url=redis_url,
            redis_prefix=redis_prefix,
        )

    def start(self) -> None:
        self.runner = LetterRunner(self.held)
        self._stop: Callable[[], None] | None = None
        self._failure: BaseException | None = None
        listener = bound_socket("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, args=(listener,), name="program")
        self._thread.start()
        eventually(self._is_ready, lambda: f"it did not start: {self._failure!r}")
        assert gc.get_freeze_count(), "a full collection would stop the steps"

    def begin_stop(self) -> None:
        """As SIGTERM does: requests inside may end."""
        assert self._stop is not None
        self._stop()

    def end_stop(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "it did not stop"
        assert self._failure is None, self._failure

    def close(self) -> None:
        """Whatever state it is in."""
        self.held.clear()
        if self._thread.is_alive():
            with suppress(RuntimeError):  # it has just ended by itself
                self.begin_stop()
            self._thread.join(PATIENCE)

    def call(self, method: str, path: str, body: Any = None) -> Reply:
        """One call, with the admin's key."""
        with self.opened(method, path, body) as response:
            return Reply(response.status, response.read().decode(), response.headers)

    @contextmanager
    def opened(self, method: str, path: str, body: Any = None) -> Iterator[http.client.HTTPResponse]:
        connection = self.connected()
        try:
            with self.send(connection, method, path, body) as response:  # closing the connection does not close it
                yield response
        finally:
            connection.close()

    def connected(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=2 * PATIENCE)

    def send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any
    ) -> http.client.HTTPResponse:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", "Connection": "close"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        return connection.getresponse()

    def _run(self, listener: Any) -> None:
        _here.set(self)
        try:
            with listener:
                asyncio.run(launch.run_server(self.settings, listener))
        except BaseException as error:
            self._failure = error

    def _is_ready(self) -> bool:
        assert self._failure is None, self._failure
        try:
            return self._stop is not None and self.call("GET", "/ready").status == 200
        except OSError:
            return False


@contextmanager
def our_model() -> Iterator[None]:
    """The wiring builds letters in place of a base model, and is stopped by calls in place of signals."""

    def on_signals(stop: asyncio.Event, *_: object) -> None:
        loop = asyncio.get_running_loop()
        _here.get()._stop = lambda: loop.call_soon_threadsafe(stop.set)

    def build(*_: object) -> ModelParts:
        return letter_parts(_here.get().runner)

    with (
        mock.patch.object(thread, "build_parts", build),
        mock.patch.object(launch.TextModel, "load", return_value=TEXT),
        mock.patch.object(launch, "on_signals", on_signals),
    ):
        yield


def eventually(is_so: Callable[[], bool], words: Callable[[], str]) -> None:
    """Wait until it is so; `words` say what is not."""
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline, words()
        threading.Event().wait(0.004)
