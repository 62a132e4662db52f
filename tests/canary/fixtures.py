"""Fixtures of whoever tests under the canaries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.canary.asking import Canaries
from tests.canary.house import House, running, settings_of
from tests.canary.questions import World, make_world
from tests.engine_choice import EngineHost


@pytest.fixture(scope="session")
def known_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """For engines in a thread."""
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def world(known_world: World, engine_host: EngineHost) -> Iterator[World]:
    with engine_host.settings() as engine:
        yield replace(known_world, engine=engine)


@pytest.fixture(scope="session")
def canaries(known_world: World) -> Canaries:
    return Canaries(known_world.questions)


@pytest.fixture(scope="module")
def house_settings() -> dict[str, Any]:
    """A file may bring its own."""
    return {}


@pytest.fixture(scope="module")
def house(world: World, tmp_path_factory: pytest.TempPathFactory, house_settings: dict[str, Any]) -> Iterator[House]:
    store: Path = tmp_path_factory.mktemp("store")
    with running(settings_of(world, store, **house_settings)) as house:
        # A process that renders adapters' templates stays once it was needed: it is none of what a test leaves behind.
        house.services.templates.processes.fault_in("")
        yield house
