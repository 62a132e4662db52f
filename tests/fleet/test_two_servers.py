"""Servers of one fleet share its engines: whoever comes later finds them, whoever is killed leaves them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from lora_serve.commands.server_process import ServerProcess
from tests.e2e.answers import answer
from tests.e2e.conftest import Site
from tests.e2e.processes import PATIENCE
from tests.e2e.streams import Stream
from tests.engine_choice import PATIENCE as READY

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.engines("ray", alone="servers share its engines"),
]


def engines_of(flags: list[str]) -> set[int]:
    """The processes of the fleet's replicas, as Ray names them."""
    name = f"ray::ServeReplica:{flags[flags.index('--fleet-name') + 1]}:".encode()
    found = set[int]()
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and (folder / "cmdline").read_bytes().startswith(name):
                found.add(int(folder.name))
        except OSError:
            continue  # it has just ended
    return found


def test_second_server_takes_the_engines_of_the_first_and_outlives_it(site: Site) -> None:
    with site.host.fleet() as flags:
        first, second = (
            ServerProcess(site.arguments(name, *site.modules(), *flags), site.log(name)) for name in ("one", "two")
        )
        with first:
            first.wait_until_ready(READY)
            engines, alone = engines_of(flags), answer(first, "acme/a")
            assert len(engines) == site.host.num_engines
            with second:
                second.wait_until_ready(READY)
                assert answer(second, "acme/a") == alone
                time.sleep(5)  # Serve looks at its replicas ten times a second
                assert engines_of(flags) == engines
                streams = [Stream(second, name) for name in ("tiny", "acme/a", "acme/b", "globex/c")]
                assert all(stream.started.wait(PATIENCE) for stream in streams)
                os.kill(first.pid, signal.SIGKILL)
                first.wait()
                for stream in streams:
                    stream.join(PATIENCE)
                assert [(stream.status, stream.is_done) for stream in streams] == [(200, True)] * 4
                assert not any("error" in event for stream in streams for event in stream.events)
                assert answer(second, "globex/d")
                assert engines_of(flags) == engines
