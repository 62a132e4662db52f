"""A process that has imported what tests need from elsewhere, and forks itself for each run of pytest.

    python -m tests.mutation.forking

Reads orders as lines of JSON, with pytest's arguments, seconds and the file for the output; answers each with a line:
pytest's exit code, or null after that time. Importing takes seconds, most tests of a mutant milliseconds. Nothing of
this repository is imported before the fork.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import time
from typing import Any

IMPORTED = (
    "pytest",
    "_hypothesis_pytestplugin",
    "hypothesis.strategies",
    "pytest_asyncio.plugin",
    "pytest_aiohttp.plugin",
    "pytest_timeout",
    "aiohttp.web",
    "msgspec",
    "numpy",
    "pydantic",
    "redis",
    "safetensors.numpy",
    "structlog",
    "yaml",
)
MOST_MEMORY = 24 << 30  # bytes of addresses: a mutant that never ends must not take the machine's memory


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    sys.dont_write_bytecode = True  # what is compiled of a mutant must not be found later
    for line in sys.stdin:
        order = json.loads(line)
        if (child := os.fork()) == 0:
            _run(order)
        print(json.dumps(_ended(child, order["seconds"])), flush=True)


def _run(order: dict[str, Any]) -> None:
    """Never returns."""
    code = 70
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
        output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(output, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        import pytest

        code = int(pytest.main(order["pytest"]))
        atexit._run_exitfuncs()
        sys.stdout.flush()
    finally:
        os._exit(code)


def _ended(child: int, seconds: float) -> int | None:
    """Waits for the child, and ends all of its session."""
    until, status = time.monotonic() + seconds, None
    while status is None and time.monotonic() < until:
        pid, found = os.waitpid(child, os.WNOHANG)
        status = found if pid else None
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
        return None
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else None


if __name__ == "__main__":
    main()
