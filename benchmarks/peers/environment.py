"""A virtual environment of its own for each peer, by a list of exact pins.

They lie under .benchmarks/peers/, or where the variable BENCHMARKS_PEERS says, so that several checkouts share them.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.peers.seam import PeerError

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("BENCHMARKS_PEERS") or ROOT / ".benchmarks" / "peers").resolve()
REQUIREMENTS = Path(__file__).with_name("requirements")
_VERSIONS = (
    "import importlib.metadata, json, sys; print(json.dumps({n: importlib.metadata.version(n) for n in sys.argv[1:]}))"
)


def python_of(name: str) -> Path:
    """The peer's interpreter. Raises PeerError before `make_environment`."""
    python = FOLDER / name / "venv" / "bin" / "python"
    if not python.exists():
        raise PeerError(f"not installed: python -m benchmarks.peers install {name}")
    return python


def make_environment(name: str) -> Path:
    """The interpreter of an environment that holds requirements/NAME.txt. Raises PeerError with pip's own words."""
    pins = REQUIREMENTS / f"{name}.txt"
    folder, stamp = FOLDER / name / "venv", FOLDER / name / "installed"
    wanted = hashlib.sha256(pins.read_bytes()).hexdigest()
    python = folder / "bin" / "python"
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    folder.parent.mkdir(parents=True, exist_ok=True)
    call([sys.executable, "-m", "venv", "--clear", str(folder)])
    call([str(python), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(pins)])
    stamp.write_text(wanted)
    return python


def call(command: Sequence[str], cwd: Path | None = None) -> str:
    """Its output. Raises PeerError with the last lines of a command that is missing or fails."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise PeerError(f"{command[0]} is not on this machine") from error
    if done.returncode != 0:
        raise PeerError(
            f"{Path(command[0]).name} {' '.join(command[1:4])} ...: {last_words(done.stdout + done.stderr)}"
        )
    return done.stdout


def last_words(text: str, count: int = 6) -> str:
    """The last lines that are not empty, without this folder's own path."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-count:]).replace(str(ROOT), ".")


def package_versions(python: Path | str, names: Sequence[str]) -> Mapping[str, str]:
    """Of distributions that are installed beside this interpreter. Raises PeerError."""
    return dict(json.loads(call([str(python), "-c", _VERSIONS, *names])))
