"""The engine hosts: one file for each value of --engine, which is the file's name. The folder is the list.

A new host is a new file here and is named nowhere else. The file has the two functions of `EngineHostModule`:
`open_host`, a context manager that gives an `EngineHost`, and `use_one_core`, called first on the server's threads. The
host's client is a `client.base.EngineClient`, for instance a `MessageClient` over another transport; its engine is
`local.LocalEngine` or, behind a connection, `service.EngineService`, which take and give the messages of
`core/messages.py`. `tests/contracts/test_engine_client.py` says what every client must do.

One server has one engine, or one fleet that looks like one: gate, figures, desired state and supervisor are single
objects behind `Services.client`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from lora_serve.adapters.registration.verification import AdapterVerifier
from lora_serve.adapters.storage import AdapterStorage
from lora_serve.client.base import EngineClient
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.settings import Settings

if TYPE_CHECKING:
    from lora_serve.text.tokenizer import TextModel


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """The parts of a loaded engine that the server uses."""

    spec: ModelSpec
    client: EngineClient
    verifier: AdapterVerifier


class EngineHost(Protocol):
    """One engine, perhaps in several lives one after another: `client.start` begins the next. On the event loop.

    A host inherits what does nothing.
    """

    can_restart: bool = False  # whether `client.start` brings a lost engine back
    is_warm: bool = False  # whether the engine has run its warm-up rows by itself, before it is loaded

    async def load(self) -> LoadedEngine:
        """Load the model. Raises ModelError, ConfigError, EngineLostError; after which it may be repeated."""

    def warm_up_done(self) -> None:
        """The warm-up is over: loads of adapters give way to steps from now on."""
        return

    async def ping(self) -> None:
        """Returns between two steps; at once, where others watch the engine. Raises EngineLostError, NotReadyError."""
        return

    async def lost(self) -> str:
        """The reason why the engine ended, once it has."""

    def kill(self, reason: str) -> None:
        """End an engine that hangs, where that can be done."""
        return


class EngineHostModule(Protocol):
    """The functions of each file of this folder."""

    def open_host(
        self, settings: Settings, storage: AdapterStorage, text: Callable[[], TextModel]
    ) -> AbstractAsyncContextManager[EngineHost]:
        """The host, as long as the block lasts. An engine in a process begins to load at once, and its own tokenizer
        with it; `text` gives the server's, which is there before `EngineHost.load` is called.
        """

    def use_one_core(self) -> None:
        """Called first on every thread of the server but the engine's, so that none of them disturbs a step."""


def engine_host_module(name: str) -> EngineHostModule:
    """The file for a value of --engine."""
    return cast(EngineHostModule, importlib.import_module(f"{__name__}.{name}"))
