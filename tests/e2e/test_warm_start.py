"""A restart: adapters that were hot are there again before anybody asks for them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lora_serve.adapters.checkpoint.content import adapter_digest
from lora_serve.commands.server_process import ServerProcess
from tests.e2e.conftest import ADMIN, Site
from tests.e2e.plain_http import call


def card(process: ServerProcess, name: str) -> Any:
    return call(f"{process.url}/admin/adapters/{name}", headers=ADMIN).json


def ask(process: ServerProcess, name: str) -> None:
    assert call(f"{process.url}/v1/completions", {"model": name, "prompt": [5, 6], "max_tokens": 2}).status == 200


def test_hot_adapters_of_the_last_run_are_warm_after_a_restart(site: Site) -> None:
    flags = "--max-loras", "2", "--adapter-eviction", "lru"
    with site.serving("warm", *flags, *site.modules()) as process:
        for name in ("acme/a", "acme/b", "globex/c"):
            ask(process, name)
        assert process.stop() == 0
    digest = {name: adapter_digest(folder) for name, folder in site.adapters.items()}
    hot = {
        item["digest"]: item["tier"] for item in json.loads((site.store("warm") / "hot.json").read_text())["adapters"]
    }
    assert hot[digest["globex/c"]] == hot[digest["acme/b"]] == "device"
    assert hot[digest["acme/a"]] == "host" or site.host.num_engines > 1  # which have slots for all three

    with site.serving("warm", *flags) as process:
        for name in ("acme/b", "globex/c"):
            assert "device" in card(process, name)["tiers"], "it must be there before /ready"
        while "host" not in card(process, "acme/a")["tiers"]:
            assert process.exit_code is None
        ask(process, "globex/c")
        assert card(process, "globex/c")["misses"] == 0
        assert process.stop() == 0


@pytest.mark.nightly  # by day: tests/faults/test_disk_faults.py
def test_broken_note_of_the_last_run_does_not_stop_the_start(site: Site) -> None:
    site.store("broken").mkdir()
    (site.store("broken") / "hot.json").write_text("{broken")
    with site.serving("broken", "--lora-modules", f"acme/a={site.adapters['acme/a']}") as process:
        assert "hot.json is ignored" in process.log.read_text()
        ask(process, "acme/a")
