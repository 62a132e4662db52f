"""This process: its collector, threads, machine and the environment of its children; notes of the servers that run on
this machine, so that commands find the one that was started last.

A note is one file per process in the user's state folder (XDG Base Directory Specification), for its owner only. It
names the URL and the store; the key itself stays in the store. A file whose process is gone is passed over, and removed
by the next server that starts.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

PREFIX = "LORA_SERVE_"
KERNELS = "LORA_SERVE_KERNELS"  # the level of the native kernels: no setting, and for every process of this machine
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS = Path("/proc/self/ns/mnt")
_LOOPBACK = ("localhost", "::1")
_log = logging.getLogger(__name__)


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables without settings (LORA_SERVE_X), as there are secrets among them; KERNELS stays."""
    return {name: text for name, text in environment.items() if not name.startswith(PREFIX) or name == KERNELS}


def machine_id() -> str:
    """Names the machine and its start: `time.monotonic()` is the same for all processes with the same name."""
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except OSError:
        return socket.gethostname()


def files_id() -> str:
    """Names the files that this process sees: processes of the same name may name files to each other by paths. Two
    containers of one machine have two names.
    """
    root, mounts = Path("/").stat(), _MOUNTS.stat().st_ino if _MOUNTS.exists() else 0
    return f"{machine_id()}.{mounts}.{root.st_dev}.{root.st_ino}.{os.geteuid()}"


@contextmanager
def without_collections() -> Iterator[None]:
    """Turns the collector off inside a block whose objects stay, such as imports: an eighth of their time is its."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class PatientThreads(ThreadPoolExecutor):
    """See ThreadPoolExecutor, which refuses work whenever it cannot start a thread; this one only while it has none."""

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if not self._threads:
                raise


@dataclass(frozen=True, slots=True)
class RunningServer:
    """One server: its URL as seen from this machine, and its store's absolute path."""

    url: str
    store: str
    pid: int
    started: float  # Unix seconds
    ticks: int  # of the process's start, by which another process with its number is distinguished; 0: not known


@contextmanager
def noted_server(url: str, store: Path) -> Iterator[None]:
    """Notes this process for as long as the block lasts. Does without where the note cannot be written."""
    note = RunningServer(url, str(store.absolute()), os.getpid(), time.time(), _ticks(os.getpid()))
    file = _folder() / f"{note.pid}.json"
    try:
        _write(file, note)
    except OSError as error:
        _log.debug("commands will not find this server by themselves: %s", error)
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def running_servers() -> list[RunningServer]:
    """Those that still run, the one that was started last first."""
    found = [note for _, note in _notes() if note is not None and _is_alive(note)]
    return sorted(found, key=lambda note: note.started, reverse=True)


def store_of(url: str) -> Path | None:
    """The store of the server of this machine that listens at `url`; None: none is known."""
    address = _address(url)
    return next((Path(note.store) for note in running_servers() if _address(note.url) == address), None)


def is_this_machine(url: str) -> bool:
    """True if the URL names a loopback address."""
    host = urlsplit(url).hostname or ""
    return host in _LOOPBACK or host.startswith("127.")


def _folder() -> Path:
    home = os.environ.get("XDG_STATE_HOME", "")
    root = Path(home) if home.startswith("/") else Path("~/.local/state").expanduser()
    return root / "lora_serve" / "servers"


def _write(file: Path, note: RunningServer) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for other, known in _notes():
        if known is None or not _is_alive(known):
            other.unlink(missing_ok=True)
    aside = file.with_suffix(".new")
    aside.unlink(missing_ok=True)
    with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as opened:
        json.dump(asdict(note), opened)
    aside.replace(file)


def _notes() -> Iterator[tuple[Path, RunningServer | None]]:
    """Each file with its note; None for what is no note of this user."""
    try:
        files = sorted(_folder().glob("*.json"))
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return
    for file in files:
        try:
            is_own = file.stat().st_uid == os.geteuid()
            yield file, RunningServer(**json.loads(file.read_bytes())) if is_own else None
        except (OSError, ValueError, TypeError):
            yield file, None


def _is_alive(note: RunningServer) -> bool:
    try:
        os.kill(note.pid, 0)
    except (OSError, OverflowError, TypeError):
        return False
    return _ticks(note.pid) == note.ticks


def _ticks(pid: int) -> int:
    """Clock ticks since the machine's start at which the process was started; 0 where /proc does not say."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _address(url: str) -> tuple[str, int | None]:
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return ("" if is_this_machine(url) else parts.hostname or "", port)
