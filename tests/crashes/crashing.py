"""The library of crash points, compiled; its numbers; the process that lives under it."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KILLED = -9
_STATE = struct.Struct("qqqq")  # as in crash_points.c
Act = list[Any]


class Points:
    """The file of the numbers, which processes map."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, kill_in: int = 0, counts_sockets: bool = False) -> None:
        self.path.write_bytes(_STATE.pack(0, kill_in, counts_sockets, 0))

    @property
    def passed(self) -> int:
        return int(_STATE.unpack(self.path.read_bytes())[0])

    def environment(self, library: Path, root: Path) -> dict[str, str]:
        """Of a process that counts from its start."""
        return {"LD_PRELOAD": str(library), "CRASH_STATE": str(self.path), "CRASH_ROOT": str(root)}

    def kill_in(self, points: int) -> None:
        """From now on: death at that point. The file stays where it is mapped."""
        self._put(1, self.passed + points)

    def spare(self, pid: int) -> None:
        """That process neither counts nor dies."""
        self._put(3, pid)

    @property
    def has_killed(self) -> bool:
        """True if the chosen point was reached."""
        passed, kill_at, *_ = _STATE.unpack(self.path.read_bytes())
        return bool(passed >= kill_at > 0)

    def _put(self, number: int, value: int) -> None:
        with self.path.open("r+b") as file:
            file.seek(8 * number)
            file.write(struct.pack("q", value))


@dataclass(frozen=True)
class Order:
    """A life. `kill`: the act and the point in it; act -1: the start, len(acts): the end."""

    store: str
    root: str  # below it points are counted
    points: str
    notes: str = ""
    url: str = ""
    acts: list[Act] = field(default_factory=list)
    kill: tuple[int, int] | None = None
    secrets: list[str] = field(default_factory=list)
    tells: bool = True
    ends_at: int = 0  # the status of an act after which the life just ends


@dataclass(frozen=True)
class Told:
    """What a life said. `first`: "ready ..." or "refused ..."; none if it died before."""

    first: str
    done: list[list[str]]
    state: dict[str, Any] | None
    exit_code: int


class Actor:
    """The process that lives, once for each order."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout

    def live(self, order: Order) -> Told:
        self._stdin.write(json.dumps(asdict(order)) + "\n")
        self._stdin.flush()
        first, done, state = "", [], None
        for line in iter(self._stdout.readline, ""):
            word, _, rest = line.strip().partition(" ")
            if word == "ended":
                return Told(first, done, state, int(rest))
            if word in ("ready", "refused"):
                first = line.strip()
            elif word == "state":
                state = json.loads(rest)
            else:
                done.append(line.split())
        raise AssertionError("the process is gone")


def compiled(folder: Path) -> Path:
    """The library. The tests of the kernels need a compiler, too."""
    library = folder / "crash_points.so"
    compiler = next(path for name in ("cc", "gcc", "clang") if (path := shutil.which(name)))
    source = str(HERE / "crash_points.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), source, "-ldl", "-lpthread"], check=True)
    return library


@contextmanager
def actor(library: Path, script: str, *arguments: str | Path) -> Iterator[Actor]:
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "LD_PRELOAD": str(library)}
    command = [sys.executable, HERE / script, *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as process:
        yield Actor(process)
        assert process.stdin is not None
        process.stdin.close()
