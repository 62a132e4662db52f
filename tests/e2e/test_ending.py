"""A server that was told to stop ends in time, whatever hangs meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lora_serve.server_process import ServerProcess
from tests.e2e.conftest import ADMIN, Site
from tests.e2e.plain_http import call
from tests.e2e.processes import PATIENCE, engine_of, eventually, is_alive

pytestmark = pytest.mark.timeout(600)


@contextmanager
def serving(site: Site, name: str, *flags: str) -> Iterator[ServerProcess]:
    arguments = [*site.arguments(name, "--shutdown-timeout", "1"), *flags]
    with ServerProcess(arguments, site.root / f"{name}-log") as process:
        process.wait_until_ready(PATIENCE)
        yield process


def exit_code(process: ServerProcess) -> int:
    """SIGTERM, once."""
    os.kill(process.pid, signal.SIGTERM)
    eventually(lambda: process.exit_code is not None, f"it does not end:\n{process.tail()}")
    return process.wait()


def test_hung_engine_holds_up_no_end(site: Site) -> None:
    with serving(site, "hung", "--engine", "process") as process:
        engine = engine_of(process.pid)
        os.kill(engine, signal.SIGSTOP)
        assert exit_code(process) == 0
        eventually(lambda: not is_alive(engine), "the engine outlives its server")


def hang_loads_of(folder: Path) -> None:
    """Whoever opens one of its files waits for ever, as on a network disk that is gone."""
    for file in [*folder.iterdir()]:
        if file.is_file():
            file.unlink()
            os.mkfifo(file)


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_load_that_hangs_holds_up_no_end(site: Site, engine: str) -> None:
    module = f"acme/a={site.adapters['acme/a']}"
    with serving(site, f"load-{engine}", "--engine", engine, "--lora-modules", module) as process:
        assert call(f"{process.url}/admin/adapters/acme/a/evict", {}, ADMIN).status == 200
        (blob,) = (site.root / f"load-{engine}" / "blobs").iterdir()
        hang_loads_of(blob)
        body = {"model": "acme/a", "prompt": [5], "timeout_ms": 300}
        assert call(f"{process.url}/v1/completions", body).status in {408, 504}
        assert exit_code(process) == 0
