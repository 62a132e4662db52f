"""Where the engines of the tests' servers run: `pytest --engine thread|process|ray`, with ray `--replicas N`.

Without the option each test says so itself, by the marker `engines`; a test that says nothing means a thread. With it
the tests that start servers by `EngineHost` run on that one host, whatever they say, and these alone. Deselected are
tests that have to do with another host alone (`engines(..., alone="the reason")`), and those that choose no host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lora_serve.commands.server_process import ServerProcess
from lora_serve.core.setting_types import names_in

if TYPE_CHECKING:
    from tests.ray_cluster import RayCluster

RAY_PATIENCE = 600.0  # seconds of a test: a fleet takes longer to start
PATIENCE = 300.0  # seconds until a server is ready
DESELECTED = pytest.StashKey[Counter[str]]()

MakeServer = Callable[[list[str], Path], ServerProcess]
Fleet = Callable[[], AbstractContextManager[list[str]]]


@dataclass(frozen=True)
class EngineHost:
    """A value of --engine. `fleet` gives the flags of servers, which share the engines where these can be shared."""

    name: str
    fleet: Fleet
    num_engines: int = 1  # of a server
    is_shared: bool = False  # by servers of one fleet

    @contextmanager
    def serving(
        self,
        arguments: Sequence[str],
        log: Path,
        *,
        wrapper: Sequence[str] = (),
        make: MakeServer = ServerProcess,
    ) -> Iterator[ServerProcess]:
        """A server that is ready. `wrapper`: a command that executes the one behind it."""
        with self.fleet() as flags:
            server = make([*arguments, *flags], log)
            server._arguments[:0] = wrapper
            with server:
                server.wait_until_ready(PATIENCE)
                yield server

    @contextmanager
    def settings(self) -> Iterator[dict[str, Any]]:
        """The flags of `fleet` as settings, for servers in this process (tests/canary)."""
        with self.fleet() as flags:
            names = [flag.removeprefix("--").replace("-", "_") for flag in flags[::2]]
            yield dict(zip(names, flags[1::2], strict=True))


def hosted_by(name: str) -> EngineHost:
    """Where each server has an engine of its own."""

    @contextmanager
    def fleet() -> Iterator[list[str]]:
        yield ["--engine", name]

    return EngineHost(name, fleet)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Callable[[], RayCluster]]:
    """It starts with the first call."""
    with ExitStack() as stack:

        @cache
        def started() -> RayCluster:
            from tests.ray_cluster import running_cluster

            return stack.enter_context(running_cluster())

        yield started


@pytest.fixture(scope="session")
def engine_host(request: pytest.FixtureRequest, ray_cluster: Callable[[], RayCluster]) -> EngineHost:
    name = request.config.getoption("engine") or getattr(request, "param", "thread")
    replicas = request.config.getoption("replicas")
    return EngineHost(name, lambda: ray_cluster().fleet(replicas), replicas, True) if name == "ray" else hosted_by(name)


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("lora_serve")
    group.addoption("--engine", choices=names_in("engine_host/hosts"), help="the engine host of all servers")
    group.addoption("--replicas", type=int, default=2, help="engines of a server on ray")


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Without the option: a test for each host of the marker."""
    marker = metafunc.definition.get_closest_marker("engines")
    if marker and "engine_host" in metafunc.fixturenames and not metafunc.config.getoption("engine"):
        by_default, at_night = marker.args, marker.kwargs.get("nightly", ())
        around = list(metafunc.definition.iter_markers("engines"))
        if by_default == ("thread",) and not any(marker.kwargs.get("nightly") for marker in around):
            return  # as without a marker: what is shared stays shared
        nightly = [pytest.param(name, marks=pytest.mark.nightly) for name in at_night]
        metafunc.parametrize("engine_host", [*by_default, *nightly], indirect=True)


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With the option: what has to do with that host."""
    name = config.getoption("engine")
    if not name:
        return
    reasons = [_reason_against(item, name) for item in items]
    config.stash[DESELECTED] = Counter(reason for reason in reasons if reason)
    config.hook.pytest_deselected(items=[item for item, reason in zip(items, reasons, strict=True) if reason])
    items[:] = [item for item, reason in zip(items, reasons, strict=True) if not reason]
    if name == "ray":
        for item in items:
            item.add_marker(pytest.mark.timeout(RAY_PATIENCE), append=False)


def _reason_against(item: pytest.Item, name: str) -> str | None:
    if "engine_host" not in getattr(item, "fixturenames", ()):
        return "as they are without --engine"
    for marker in item.iter_markers("engines"):
        known = *marker.args, *marker.kwargs.get("nightly", ()), *marker.kwargs.get("also", ())
        if "alone" in marker.kwargs and name not in known:
            return f"for {' and '.join(known)} alone: {marker.kwargs['alone']}"
    return None


def report(config: pytest.Config) -> list[str]:
    """Why tests were deselected."""
    found = config.stash.get(DESELECTED, Counter())
    return [f"--engine {config.getoption('engine')} leaves out {number}: {why}" for why, number in found.items()]
