"""Runs the checks of one client in that client's own environment; prints one JSON object per check.

This file and the `*_checks.py` beside it import nothing of lora_serve and nothing of the tests: they stand for a
user's program. A check is a function `check_<what>`; it passes if it returns, and fails if it raises. What it
returns, text or nothing, is its finding.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path


@dataclass(frozen=True)
class Server:
    """The server under test, as a user knows it."""

    url: str  # without /v1
    key: str  # a tenant's key
    model_folder: str  # the base model, for clients that tokenise by themselves
    adapters_folder: str  # the demo's adapters, <tenant>/<name>
    recorded_folder: str  # recorded requests of programs

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


BASE = "demo-base"
SQL = "acme/sql"
SQL_PROMPT = "List the city and age of all customers whose country is Portugal."
SQL_ANSWER = "SELECT city, age FROM customers WHERE country = 'Portugal';"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["admin", "user"]},
    },
    "required": ["name", "age", "role"],
    "additionalProperties": False,
}


def this_server() -> Server:
    """The server that the environment names."""
    names = ("URL", "KEY", "MODEL_FOLDER", "ADAPTERS_FOLDER", "RECORDED_FOLDER")
    return Server(*(os.environ[f"CHECKED_{name}"] for name in names))


def main(client: str, packages: list[str]) -> int:
    """Runs all checks of `<client>_checks.py`; returns the number that failed."""
    sys.path.insert(0, str(Path(__file__).parent))
    module = importlib.import_module(f"{client}_checks")
    server = this_server()
    checks = [value for name, value in vars(module).items() if name.startswith("check_") and callable(value)]
    versions = {name: version(name) for name in packages}
    return sum(not _passes(client, versions, check, server) for check in checks)


def _passes(client: str, versions: dict[str, str], check: Callable[[Server], object], server: Server) -> bool:
    start = time.perf_counter()
    error, found = None, None
    try:
        found = check(server)
    except BaseException as raised:  # a library may end the process
        error = "".join(traceback.format_exception(raised))[-4000:]
    seconds = round(time.perf_counter() - start, 2)
    name = check.__name__.removeprefix("check_")
    result = {"client": client, "versions": versions, "check": name, "seconds": seconds, "error": error}
    result["says"], result["found"] = (check.__doc__ or "").strip(), found
    print("CHECK " + json.dumps(result), flush=True)
    return error is None


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1], sys.argv[2:])))
