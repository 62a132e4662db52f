"""The seam between the server and wherever the engine runs. No torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

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
    """One engine, perhaps in several lives one after another: `client.start` begins the next. On the event loop."""

    can_restart: bool  # whether `client.start` brings a lost engine back
    is_warm: bool  # whether the engine has run its warm-up rows by itself, before it is loaded

    async def load(self) -> LoadedEngine:
        """Load the model. Raises ModelError, ConfigError, EngineLostError; after which it may be repeated."""

    def warm_up_done(self) -> None:
        """The warm-up is over: loads of adapters give way to steps from now on."""

    async def ping(self) -> None:
        """Returns between two steps. Raises EngineLostError, NotReadyError."""

    async def lost(self) -> str:
        """The reason why the engine ended, once it has."""

    def kill(self, reason: str) -> None:
        """End an engine that hangs, where that can be done."""


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
