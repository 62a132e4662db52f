"""The folder of engine hosts is the list of the values of --engine."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from lora_serve.core.messages import FinishEvent
from lora_serve.core.setting_types import names_in
from lora_serve.core.settings import Settings
from lora_serve.engine_host import hosts
from tests.engine_host.engine_clients import request

TOY = """
from contextlib import asynccontextmanager

from tests.mock_engine import MockEngineClient
from lora_serve.engine_host.hosts import LoadedEngine


def use_one_core():
    pass


@asynccontextmanager
async def open_host(settings, storage, text):
    yield ToyHost(settings)


class ToyHost:
    can_restart = False
    is_warm = False

    def __init__(self, settings):
        self.settings = settings

    async def load(self):
        return LoadedEngine(self.settings.model, MockEngineClient(vocab_size=50), verifier=None)
"""


def test_files_are_the_values_of_the_setting() -> None:
    assert get_args(Settings.model_fields["engine"].annotation) == names_in("engine_host/hosts")
    assert set(names_in("engine_host/hosts")) >= {"thread", "process"}


@pytest.mark.parametrize("name", names_in("engine_host/hosts"))
def test_every_file_of_the_folder_is_an_engine_host(name: str) -> None:
    module = hosts.engine_host_module(name)
    assert callable(module.open_host)
    assert callable(module.use_one_core)


async def test_new_file_in_the_folder_is_an_engine_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.setattr(hosts, "__path__", [*hosts.__path__, str(tmp_path)])
    nothing: Any = SimpleNamespace()
    try:
        async with hosts.engine_host_module("toy").open_host(Settings(model="toy"), nothing, nothing) as host:
            engine = await host.load()
            await engine.client.start()
            events = [event async for event in engine.client.infer(request("r"))]
            await engine.client.stop()
    finally:
        sys.modules.pop("lora_serve.engine_host.hosts.toy", None)
    assert isinstance(events[-1], FinishEvent)
