"""`lora-serve serve` on threads of this process: real HTTP, engine, store and loaders, whose inside can be seen and
broken.

The wiring itself starts and stops it; its parts are caught as they are built. With the engine elsewhere
(`World.engine`) `parts`, `engine` and `loader` are not here: a test that needs them says so (`INSIDE`).
"""

from __future__ import annotations

import asyncio
import gc
import http.client
import itertools
import json
import logging
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import pytest
from aiohttp import web

from lora_serve.app import launch, serving
from lora_serve.core.settings import Settings
from lora_serve.engine.engine import Engine
from lora_serve.engine.loader import Loader
from lora_serve.engine_host import local
from lora_serve.engine_host.hosts import thread
from lora_serve.model.build import ModelParts
from lora_serve.model.lora.host_adapter import HostAdapter
from lora_serve.server.lifecycle import ServerState
from lora_serve.server.services import Services
from lora_serve.server.sockets.listener import bound_socket
from tests.canary.loop_lag import LagFigures, keep_probing, time_turns_of
from tests.canary.questions import BASE, TENANTS, World

T = TypeVar("T")
KEY = "admin-key-of-the-tests"
COLLECTED_EVERY = 16  # houses
ADMIN = {"Authorization": f"Bearer {KEY}"}
CAUGHT: tuple[tuple[Any, str, str], ...] = (  # what the wiring calls, and our name for what it gets
    (thread, "build_parts", "parts"),
    (local, "build_engine", "engine"),
    (local, "Loader", "loader"),
    (serving, "build_app", "app"),
    (serving, "Services", "services"),
)
INSIDE = "the engine is looked into, or broken from inside"  # `engines("thread", alone=INSIDE)`
LOGGERS = ("lora_serve", "asyncio", "aiohttp")
_BUILDING: ContextVar[House] = ContextVar("_BUILDING")  # whose wiring runs: there may be two at a time
_ENDED = itertools.count(1)  # houses


_CONNECTED_BY: dict[int, str] = {}  # the last caller of `connect` by the number of the socket


def _note_connection(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.connect":
        frames = traceback.walk_stack(sys._getframe(1))
        places = [f"{frame.f_code.co_filename}:{line}" for frame, line in itertools.islice(frames, 12)]
        _CONNECTED_BY[arguments[0].fileno()] = f"in {os.environ.get('PYTEST_CURRENT_TEST')}: {' < '.join(places)}"


sys.addaudithook(_note_connection)


def _collect_what_starts_froze() -> None:
    """Much of it is garbage by now. The suite's own objects stay frozen: each collection over them takes seconds.

    What tests before this one left is collected too. One kind of it is let pass: a socket that http.client has closed
    while the object of its answer was still there, both in one cycle of references. All else fails the test that runs.
    """
    gc.unfreeze()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        gc.collect()
    gc.freeze()
    left = [str(one.message) for one in found]
    left = [words for words in left if not words.startswith("unclosed <socket.socket [closed]")]
    numbers = [int(number) for words in left for number in re.findall(r"fd=(\d+)", words)]
    assert not left, (left, [_CONNECTED_BY.get(number) for number in numbers])


class House:
    """A running server. What it logs, with tracebacks, is in `log`."""

    services: Services
    parts: ModelParts
    engine: Engine
    loader: Loader[HostAdapter]
    app: web.Application
    loop: asyncio.AbstractEventLoop
    keys: dict[str, str]  # API keys of the tenants, if keys are needed

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.log: list[str] = []
        self.keys = {}
        self.exit_code: int | None = None
        self.error: BaseException | None = None
        self.lag = LagFigures()
        self._stop: asyncio.Event
        self._thread = threading.Thread(target=self._run, name="server")
        self._listener = bound_socket(settings.host, settings.port)
        self.port = int(self._listener.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def store(self) -> Path:
        return self.settings.store

    @property
    def has_engine(self) -> bool:
        """True if `parts`, `engine` and `loader` are here."""
        return self.settings.engine == "thread"

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        """Return once it is ready; raise what ended it."""
        self._thread.start()
        wait = threading.Event()
        while not (hasattr(self, "services") and self.services.lifecycle.state is ServerState.READY):
            if not self._thread.is_alive():
                raise self.error or RuntimeError(f"it ended: {self.log[-5:]}")
            wait.wait(0.01)

    def give_keys(self) -> None:
        """Each tenant gets a key of its own."""
        for tenant in TENANTS:
            self._admin("/admin/tenants", {"name": tenant})
            self.keys[tenant] = self._admin(f"/admin/tenants/{tenant}/keys", {"label": "canary"})["secret"]

    def _admin(self, path: str, body: dict[str, Any]) -> Any:
        """A tenant that is there already, from an earlier life of the store, is fine."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", path, json.dumps(body), {**ADMIN, "Content-Type": "application/json"})
        answer = connection.getresponse()
        content = json.loads(answer.read())
        connection.close()
        assert answer.status in (201, 409), content
        return content

    def stop(self) -> None:
        """As SIGTERM does."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        if next(_ENDED) % COLLECTED_EVERY == 0:
            _collect_what_starts_froze()

    def on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def logged(self) -> str:
        return "\n".join(self.log)

    def _run(self) -> None:
        _BUILDING.set(self)
        time_turns_of(self._thread, self.lag)
        try:
            with self._caught():
                self.exit_code = asyncio.run(launch.run_server(self.settings, self._listener))
        except BaseException as error:
            self.error = error
        finally:
            self._listener.close()

    @contextmanager
    def _caught(self) -> Iterator[None]:
        """The wiring hands what it builds to us too; signals are for the main thread, so `stop` stands for them."""
        interval = sys.getswitchinterval()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "on_signals", self._take_stop)
            for module, name, attribute in CAUGHT:
                patch.setattr(module, name, self._catching(getattr(module, name), attribute))
            try:
                yield
            finally:
                sys.setswitchinterval(interval)

    def _take_stop(self, stop: asyncio.Event, *_: object) -> None:
        self._stop = stop
        self.loop = asyncio.get_running_loop()
        self._probing = self.loop.create_task(keep_probing(self.lag), name="the harness's own probe")

    def _catching(self, make: Any, attribute: str) -> Any:
        def made(*arguments: Any, **options: Any) -> Any:
            value = make(*arguments, **options)
            if _BUILDING.get(self) is self:
                setattr(self, attribute, value)
            return value

        return made


class _Keeper(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.INFO)
        self._lines = lines
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))


def settings_of(world: World, store: Path, **changes: Any) -> Settings:
    """Small: 4 slots for 8 adapters, so that canaries alone keep pushing one another out."""
    chosen: dict[str, Any] = {
        "model": str(world.model), "served_model_name": BASE, "admin_key": KEY, "auth": "on", "port": 0, "store": store,
        "adapter_root": (world.root,), "lora_modules": world.modules(), "max_model_len": 96, "warmup": "off",
        "kv_cache_memory": 4 * 2**20, "max_loras": 4, "max_num_seqs": 16, "max_num_batched_tokens": 64,
        "shutdown_timeout": 10.0, "wrong_keys_per_minute": 0, "admin_acts_per_minute": 0, "tenant_acts_per_minute": 0,
    }  # fmt: skip
    return Settings(**{**chosen, **world.engine, **changes})


@contextmanager
def running(settings: Settings, keys: Mapping[str, str] | None = None) -> Iterator[House]:
    """A house for as long as the block lasts. `keys`: the tenants have these from an earlier life; None: make some."""
    house = House(settings)
    keeper = _Keeper(house.log)
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(keeper)
        logger.setLevel(logging.INFO)
    try:
        house.start()
        if keys is not None:
            house.keys = dict(keys)
        elif settings.auth == "on":
            house.give_keys()
        yield house
    finally:
        house.stop()
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(keeper)
            logger.setLevel(level)
