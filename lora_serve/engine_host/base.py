"""The seam between the server and wherever the engine runs. No torch."""

from __future__ import annotations

import importlib
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, cast

from lora_serve.adapters.registration.verification import AdapterVerifier
from lora_serve.adapters.storage import AdapterStorage
from lora_serve.client.base import EngineClient
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.settings import Settings


@dataclass(frozen=True, slots=True)
class HostedModel:
    """What the server knows of a loaded engine."""

    spec: ModelSpec
    client: EngineClient
    verifier: AdapterVerifier


class EngineHost(Protocol):
    """One engine, perhaps in several lives one after another: `client.start` begins the next. On the event loop."""

    can_restart: bool  # whether `client.start` brings a lost engine back

    async def load(self) -> HostedModel:
        """Load the model. Raises ModelError, ConfigError, EngineLostError; after the last one it may be tried again."""

    def warm_up_done(self) -> None:
        """The warm-up is over: loads of adapters give way to steps from now on."""

    async def ping(self) -> None:
        """Returns between two steps. Raises EngineLostError, NotReadyError."""

    async def lost(self) -> str:
        """Why the engine ended, once it has."""

    def kill(self, reason: str) -> None:
        """It hangs: end it, where that can be done."""


class HostModule(Protocol):
    """What each file of this package that is a value of --engine holds."""

    def open_host(self, settings: Settings, storage: AdapterStorage) -> AbstractAsyncContextManager[EngineHost]:
        """As long as the block lasts. A process begins to load at once."""

    def use_one_core(self) -> None:
        """Called first on every thread of the server that is not the engine's."""


def host_module(name: str) -> HostModule:
    """The file for a value of --engine."""
    return cast(HostModule, importlib.import_module(f"lora_serve.engine_host.{name}"))
