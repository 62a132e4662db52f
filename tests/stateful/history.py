"""One random history of acts, kills and lost catalogs, and what it must leave: everything that was acknowledged."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_serve.adapters.maintenance.rebuild import rebuild_folder, rebuild_redis
from lora_serve.adapters.maintenance.registries import RegistryAddress
from tests.stateful.catalog_damage import RedisDamage, SqliteDamage
from tests.stateful.expected import Adapter, Expected

SCRIPT = Path(__file__).with_name("history_process.py")
TENANTS = ("acme", "globex")
NAMES = tuple(f"{tenant}/{name}" for tenant in TENANTS for name in ("a", "b", "c"))
ALIASES = ("live", "next", "old")
Act = list[Any]
Shown = dict[str, Any]  # of one id, as the process tells it


@dataclass
class Shared(Expected):
    """The model of the registry's own tests, and with whom an id is shared."""

    shared_with: dict[str, list[str]] = field(default_factory=dict)

    def share(self, name: str, tenants: list[str]) -> int:
        if name not in self.adapters:
            return 404
        self.shared_with[name] = sorted(set(tenants) - {name.partition("/")[0]})
        return 200

    def delete(self, name: str, version: int | None) -> int:
        status = super().delete(name, version)
        if name not in self.adapters:
            self.shared_with.pop(name, None)
        return status

    def delete_tenant(self, tenant: str) -> int:
        for name in [name for name in self.adapters if name.startswith(f"{tenant}/")]:
            self.delete(name, None)
        for name, tenants in self.shared_with.items():
            self.shared_with[name] = [other for other in tenants if other != tenant]
        return 200

    def shown(self, digests: Sequence[str]) -> dict[str, Shown]:
        return {
            name: {
                "versions": {str(number): digests[content] for number, content in adapter.versions.items()},
                "last_version": adapter.last_version,
                "route": adapter.route,
                "canary": list(adapter.canary) if adapter.canary else None,
                "history": adapter.history,
                "pinned": adapter.pinned,
                "shared_with": self.shared_with.get(name, []),
            }
            for name, adapter in self.adapters.items()
        }

    def shown_aliases(self, digests: Sequence[str]) -> dict[str, str]:
        """Targets by content become targets by digest."""
        parted = {alias: target.partition("@content:") for alias, target in self.aliases.items()}
        return {a: f"{name}@{digests[int(n)]}" if at else name for a, (name, at, n) in parted.items()}


def an_act(draw: random.Random, state: Shared, num_contents: int) -> Act:
    """One that may come next; not all of them succeed."""
    name = draw.choice(NAMES)
    adapter = state.adapters.get(name)
    numbers = [*adapter.versions, 99] if adapter else [1]
    if adapter is None or draw.random() < 0.35:
        return ["register", name, draw.randrange(num_contents), draw.random() < 0.7, draw.random() < 0.2]
    target = name if draw.random() < 0.5 else f"{name}@content:{draw.choice([*adapter.versions.values()])}"
    canary = [draw.choice(numbers), draw.choice([5.0, 50.0])]
    return draw.choice(
        [
            ["set_route", name, draw.choice(numbers), None],
            ["set_route", name, None, canary],
            ["roll_back", name],
            ["delete", name, draw.choice(numbers)],
            ["delete", name, None],
            ["set_alias", draw.choice(ALIASES), target],
            ["remove_alias", draw.choice(ALIASES)],
            ["set_pinned", name, draw.random() < 0.5],
            ["share", name, draw.sample([*TENANTS, "initech"], 2)],
            ["delete_tenant", draw.choice(TENANTS)] if draw.random() < 0.3 else ["roll_back", name],
        ]
    )


class Actor:
    """The process that acts; one life after the other."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout

    def live(self, store: Path, url: str, acts: list[Act], kill_after: int = -1, wait: float = 0.0) -> list[str]:
        """What it said. `kill_after`: kill -9 `wait` seconds after so many lines."""
        self._stdin.write(json.dumps({"store": str(store), "url": url, "acts": acts}) + "\n")
        self._stdin.flush()
        pid = int(self._stdout.readline().removeprefix("alive "))
        said: list[str] = []
        timer = threading.Timer(wait, _kill, (pid,))
        if kill_after == 0:
            timer.start()
        for line in iter(self._stdout.readline, ""):
            if line.startswith("ended "):
                timer.cancel()
                assert line.strip() in ("ended 0", f"ended {-signal.SIGKILL}"), line
                return said
            if not line.strip():  # a line that was cut by a kill ends here
                continue
            said.append(line.strip())
            if len(said) == kill_after:
                timer.start()
        raise AssertionError("the process is gone")


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@contextmanager
def actor(spec: str, folders: Sequence[Path]) -> Iterator[Actor]:
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[2])}
    command = [sys.executable, SCRIPT, spec, *folders]
    with subprocess.Popen(
        command, text=True, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield Actor(process)
        assert process.stdin is not None
        process.stdin.close()


class History:
    """`seed` says all that happens in it, but for the moment within an act at which a kill hits."""

    def __init__(self, seed: int, actor: Actor, store: Path, digests: Sequence[str], url: str = "") -> None:
        self._draw = random.Random(seed)
        self._actor = actor
        self._store = store
        self._url = url
        self._digests = digests
        self._damage = RedisDamage(store, self._draw, url) if url else SqliteDamage(store, self._draw)
        self._model = Shared()
        self.log: list[str] = [f"seed {seed}"]
        self.num_rebuilt = 0
        self._older_names: set[str] = set()

    def run(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            candidates = self._live()
            if self._draw.random() < 0.4:
                self._damage.remember()
                self._older_names = {name for one in candidates for name in (*one.adapters, *one.aliases)}
            kind = self._draw.choice(self._damage.kinds)
            is_lossy = self._damage.do(kind)
            self.log.append(f"damage {kind}")
            self._check(self._recover(), candidates, is_lossy)

    # -- a life ------------------------------------------------------------------------------------------------

    def _live(self) -> list[Shared]:
        """The states that may be there now: one, or two if an act was under way when the process was killed."""
        acts, states = [], [self._model]
        for _ in range(self._draw.randint(3, 10)):
            state = copy.deepcopy(states[-1])
            act = an_act(self._draw, state, len(self._digests))
            acts.append(act)
            getattr(state, act[0])(*act[1:])
            states.append(state)
        is_killed = self._draw.random() < 0.7
        kill_after = self._draw.randint(1, len(acts)) if is_killed else -1
        said = self._actor.live(self._store, self._url, acts, kill_after, self._draw.random() * 0.03)
        self.log += [f"{act} -> {status}" for act, status in zip(acts, [*said[1:], *["?"] * len(acts)], strict=False)]
        assert said[0].startswith("ready "), said
        done = sum(line.isdigit() for line in said)
        for state, act, line in zip(states, acts, said[1 : 1 + done], strict=False):
            assert int(line) == getattr(copy.deepcopy(state), act[0])(*act[1:]), act
        return states[done : done + 2]

    # -- what an operator does ---------------------------------------------------------------------------------

    def _recover(self) -> Shown:
        """Start; if that is refused, or tells of blobs that are kept aside, rebuild and start again."""
        said = self._actor.live(self._store, self._url, [])
        if said[0] != "ready 0":
            self.log.append(said[0])
            self._rebuild()
            said = self._actor.live(self._store, self._url, [])
        assert said[0].startswith("ready "), self._words("a start after a rebuild", said[0], "ready")
        return dict(json.loads(said[1].removeprefix("state ")))

    def _rebuild(self) -> None:
        if self._url:
            rebuilt = rebuild_redis(RegistryAddress(self._url, "--redis-url"), [self._store], False, _ignore)
            for path in self._store.glob("cache/unnamed/*"):
                _remove(path)  # they are in Redis again; those that are not were let go
        else:
            rebuilt = rebuild_folder(self._store, [], False, _ignore)
            for path in self._store.glob("unnamed/*"):
                _remove(path)
        self.num_rebuilt += 1
        self.log.append(f"rebuilt: {rebuilt.was}, {[(one.name, one.outcome.value) for one in rebuilt.plan.ids]}")

    # -- what must be there ------------------------------------------------------------------------------------

    def _check(self, state: Shown, candidates: list[Shared], is_lossy: bool) -> None:
        entries, shown = state["entries"], [candidate.shown(self._digests) for candidate in candidates]
        was_deleted: set[str] = set()
        for name in {name for one in shown for name in one}:
            wanted = [one.get(name) for one in shown]
            if is_lossy and None in wanted:  # its deletion was under way: an older copy may know it as it once was
                was_deleted.add(name)
                continue
            if self._damage.hides_the_fork and name in self._older_names:
                kept = set(entries[name]["versions"].values()) if name in entries else set()
                assert any(kept >= set(one["versions"].values()) for one in wanted if one), self._words(
                    name, entries.get(name), wanted
                )
                continue
            assert entries.get(name) in wanted, self._words(name, entries.get(name), wanted)
            if name in entries:
                bad = set(entries[name]["versions"].values()) & set(state["bad"])
                assert not bad, self._words(name, f"cannot be served: {bad}", wanted)
        aliases = [candidate.shown_aliases(self._digests) for candidate in candidates]
        for alias in {alias for one in aliases for alias in one}:
            wanted_targets = [one.get(alias) for one in aliases]
            if is_lossy and None in wanted_targets:
                continue
            if self._damage.hides_the_fork and alias in self._older_names and alias in state["aliases"]:
                continue
            assert state["aliases"].get(alias) in wanted_targets, self._words(
                alias, state["aliases"].get(alias), wanted_targets
            )
        extra = entries.keys() - {name for one in shown for name in one}
        assert is_lossy or not extra, self._words("nothing else", extra, [])
        self._adopt(state, sorted(extra | was_deleted & entries.keys()))

    def _adopt(self, state: Shown, extra: list[str]) -> None:
        """What is there is what goes on; ids that came back though they were deleted are deleted again."""
        said = self._actor.live(self._store, self._url, [["delete", name, None] for name in extra])
        state = json.loads(said[-1].removeprefix("state "))
        contents = {digest: number for number, digest in enumerate(self._digests)}
        self._model = Shared()
        for name, one in state["entries"].items():
            versions = {int(number): contents[digest] for number, digest in one["versions"].items()}
            canary = (one["canary"][0], one["canary"][1]) if one["canary"] else None
            self._model.adapters[name] = Adapter(
                one["pinned"], versions, one["last_version"], one["route"], canary, list(one["history"])
            )
            self._model.shared_with[name] = one["shared_with"]
        for alias, target in state["aliases"].items():
            name, at, digest = target.partition("@")
            self._model.aliases[alias] = f"{name}@content:{contents[digest]}" if at else name

    def _words(self, name: str, found: object, wanted: object) -> str:
        return "\n".join([*self.log, f"{name}: found {found}, wanted one of {wanted}"])


def _ignore(done: int, total: int) -> None:
    """Nobody watches."""


def _remove(path: Path) -> None:
    shutil.rmtree(path)
