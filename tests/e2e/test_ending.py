"""A server that was told to stop ends in time, whatever hangs meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lora_serve.commands.server_process import ServerProcess
from tests.e2e.conftest import ADMIN, Site
from tests.e2e.plain_http import call
from tests.e2e.processes import PATIENCE, engine_of, eventually, is_alive
from tests.tiers import mostly_nightly

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


@pytest.mark.nightly  # 15 s of waiting; by day: tests/client/test_process.py
def test_hung_engine_holds_up_no_end(site: Site) -> None:
    with serving(site, "hung", "--engine", "process") as process:
        engine = engine_of(process.pid)
        os.kill(engine, signal.SIGSTOP)
        assert exit_code(process) == 0
        eventually(lambda: not is_alive(engine), "the engine outlives its server")


HANGING = """
import os, threading

MARK = os.environ["HANG_WHILE_THERE_IS"]
plain = os.open

def hanging(path, *arguments, **options):
    if "/blobs/" in os.fsdecode(path) and os.path.exists(MARK):
        threading.Event().wait()
    return plain(path, *arguments, **options)

os.open = hanging
"""


@pytest.fixture
def hang_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on whoever opens a stored file waits for ever, as on a network disk that is gone."""
    (tmp_path / "sitecustomize.py").write_text(HANGING)
    monkeypatch.setenv("HANG_WHILE_THERE_IS", str(tmp_path / "mark"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return (tmp_path / "mark").touch


@pytest.mark.parametrize("engine", mostly_nightly(["thread", "process"], "process"))
def test_load_that_hangs_holds_up_no_end(site: Site, engine: str, hang_loads: Callable[[], None]) -> None:
    module = f"acme/a={site.adapters['acme/a']}"
    with serving(site, f"load-{engine}", "--engine", engine, "--lora-modules", module) as process:
        assert call(f"{process.url}/admin/adapters/acme/a/evict", {}, ADMIN).status == 200
        hang_loads()
        body = {"model": "acme/a", "prompt": [5], "timeout_ms": 300}
        assert call(f"{process.url}/v1/completions", body).status in {408, 504}
        assert exit_code(process) == 0
