"""kill -9 in the middle of registrations: what was acknowledged is there and loads; what was not left no trace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest

from lora_serve.core.model_spec import ModelSpec
from tests.adapters.registration.registering_process import open_for_registering
from tests.catalog_versions import held
from tests.loading import fetch_adapter
from tests.tiers import by_tier, mostly_nightly

if TYPE_CHECKING:
    from tests.adapters.conftest import MakeAdapter

SCRIPT = Path(__file__).with_name("registering_process.py")
KILLED = -signal.SIGKILL


class Victim:
    """The process, and what is known of the adapters that it acknowledged: id -> digest."""

    def __init__(self, process: subprocess.Popen[str], store: Path, spec: ModelSpec, redis_url: str) -> None:
        self._process = process
        self._store = store
        self._spec = spec
        self._redis_url = redis_url
        self.known: dict[str, str] = {}
        self.num_answers = 0

    def run(self, kill_at: int = 0, kill_after: int | None = None, wait: float = 0.0) -> int:
        """One run; its exit status. `kill_after`: kill it `wait` seconds after so many answers."""
        stdin, stdout = self._pipes()
        stdin.write(f"{self.num_answers} {kill_at}\n")
        stdin.flush()
        pid = int(stdout.readline().removeprefix("ready "))
        for count, line in enumerate(iter(stdout.readline, ""), start=1):
            if line.startswith("ended "):
                return int(line.removeprefix("ended "))
            self._note(line.strip())
            if count == kill_after:
                threading.Timer(wait, os.kill, (pid, signal.SIGKILL)).start()
        raise AssertionError("the process is gone")

    def check(self) -> None:
        """Restart on the store and look."""
        _, catalog, store = open_for_registering(self._store, self._spec, self._redis_url)
        named = {entry.name: entry for entry in catalog.snapshot.page(limit=10**6)}
        for name, digest in self.known.items():
            assert name in named, f"{name} was acknowledged and is gone"
            assert digest in [version.digest for version in named[name].versions], f"{name} lost its version"
        # Beyond these only the one registration or deletion under way when the process died.
        assert len(named.keys() - self.known.keys()) <= 1
        for entry in named.values():
            for version in entry.versions:
                assert fetch_adapter(store, self._spec, entry.ref(version)).digest == version.digest
        assert store.digests() == catalog.snapshot.digests
        assert held(catalog) == set()
        assert os.listdir(self._store / "tmp") == []
        assert list(self._store.glob("**/quarantine")) == []
        self.known = {name: entry.default.digest for name, entry in named.items()}
        catalog.close()

    def _note(self, line: str) -> None:
        if line.startswith("-"):
            self.known.pop(line[1:], None)
        else:
            label, digest = line.split(" ")
            self.known[label.partition("@")[0]] = digest
        self.num_answers += 1

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout


@pytest.fixture(params=mostly_nightly(["embedded", "shared"], "embedded"))
def victim(
    request: pytest.FixtureRequest, make_adapter: MakeAdapter, spec: ModelSpec, tmp_path: Path
) -> Iterator[Victim]:
    url = request.getfixturevalue("redis_url") if request.param == "shared" else ""
    folders = [make_adapter(str(seed), seed=seed) for seed in range(9)]
    shapes = {path: [linear.in_features, linear.out_features] for path, linear in spec.linears.items()}
    command = [sys.executable, SCRIPT, tmp_path / "store", url, json.dumps(shapes), *folders]
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[3])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as process:
        yield Victim(process, tmp_path / "store", spec, url)
        assert process.stdin is not None
        process.stdin.close()


@pytest.mark.search
def test_acknowledged_registrations_survive_kill_9_at_any_moment(victim: Victim) -> None:
    for answers in range(1, 9, by_tier(2, 1)):
        assert victim.run(kill_after=2 * answers, wait=0.0013 * answers) == KILLED
        victim.check()
    assert len(victim.known) > by_tier(3, 5)


@pytest.mark.search
def test_kill_9_at_every_step_of_a_registration_and_a_deletion_leaves_whole_adapters_only(victim: Victim) -> None:
    kill_at = 1
    while victim.run(kill_at) == KILLED:
        victim.check()
        kill_at += by_tier(3, 1)
    victim.check()
    assert kill_at > 30  # the steps were really counted
