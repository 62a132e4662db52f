"""A restart: adapters that were hot are there again before anybody asks for them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lora_serve.adapters.checkpoint.digest import adapter_digest
from lora_serve.commands.server_process import ServerProcess
from tests.e2e.conftest import ADMIN, Site
from tests.e2e.plain_http import call


def card(process: ServerProcess, name: str) -> Any:
    return call(f"{process.url}/admin/adapters/{name}", headers=ADMIN).json


def ask(process: ServerProcess, name: str) -> None:
    assert call(f"{process.url}/v1/completions", {"model": name, "prompt": [5, 6], "max_tokens": 2}).status == 200


def test_hot_adapters_of_the_last_run_are_warm_after_a_restart(site: Site) -> None:
    arguments, log = (
        site.arguments("warm-store", "--max-loras", "2", "--adapter-eviction", "lru"),
        site.root / "warm-log",
    )
    modules = [f"{name}={folder}" for name, folder in site.adapters.items()]
    with ServerProcess([*arguments, "--lora-modules", *modules], log) as process:
        process.wait_until_ready(90)
        for name in ("acme/a", "acme/b", "globex/c"):
            ask(process, name)
        assert process.stop() == 0
    digest = {name: adapter_digest(folder) for name, folder in site.adapters.items()}
    hot = {
        item["digest"]: item["tier"]
        for item in json.loads((site.root / "warm-store" / "hot.json").read_text())["adapters"]
    }
    assert hot[digest["globex/c"]] == hot[digest["acme/b"]] == "device"
    assert hot[digest["acme/a"]] == "host"

    with ServerProcess(arguments, log) as process:
        process.wait_until_ready(90)
        for name in ("acme/b", "globex/c"):
            assert "device" in card(process, name)["tiers"], "it must be there before /ready"
        while "host" not in card(process, "acme/a")["tiers"]:
            assert process.exit_code is None
        ask(process, "globex/c")
        assert card(process, "globex/c")["misses"] == 0
        assert process.stop() == 0


@pytest.mark.nightly  # by day: tests/faults/test_disk_faults.py
def test_broken_note_of_the_last_run_does_not_stop_the_start(site: Site) -> None:
    arguments, log = site.arguments("broken-store"), site.root / "broken-log"
    (site.root / "broken-store").mkdir()
    (site.root / "broken-store" / "hot.json").write_text("{broken")
    with ServerProcess([*arguments, "--lora-modules", f"acme/a={site.adapters['acme/a']}"], log) as process:
        process.wait_until_ready(90)
        assert "hot.json is ignored" in log.read_text()
        ask(process, "acme/a")
