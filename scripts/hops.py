"""Counts the hops of one streamed chat completion, from the socket to the tokens and back.

    python scripts/hops.py [--write benchmarks/results/hops.json --label after]

A real server with its engine on a thread answers one request on the bundled model; `sys.setprofile` watches the calls.

A hop is a call, on the way of this request, into a file of `server/`, `text/` or `client/` from another file of
`lora_serve` (or from the event loop). Each pair of files counts once. Not counted: properties and lambdas, which a
reader does not follow; a call back into a file that waits for this call (a callback); what the server does for itself
meanwhile. What is asked of the floors beside and below (tenants, engine, catalog, words) is in the list without a
number, and the engine's step is not followed: it is the same for all rows.

Generators per token: the async generators that are resumed for every token between the engine and the socket.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import functools
import inspect
import json
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import aiohttp

import lora_serve
from lora_serve.app.launch import run_server
from lora_serve.core.settings import Settings
from lora_serve.server.sockets.listener import bound_socket

PACKAGE = Path(lora_serve.__file__).parent
COUNTED = ("server/", "text/", "client/")
OWN_WORK = {"kept_going", "ThreadHost.ping"}  # what the server does for itself: its tasks, its watch over the engine
NUM_TOKENS = 12
BODY = {"messages": [{"role": "user", "content": "Hello"}], "stream": True, "max_tokens": NUM_TOKENS, "temperature": 0}


class Watch:
    """A profile function; it notes calls while `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self.hops: dict[tuple[str, str], str] = {}  # (caller's file, called file) -> the first call
        self.resumed: Counter[str] = Counter()  # calls of async generators

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if not self.is_on or event != "call" or (file := _file(frame.f_code)) is None:
            return
        if frame.f_code.co_flags & inspect.CO_ASYNC_GENERATOR:
            self.resumed[f"{file} {frame.f_code.co_qualname}"] += 1
        callers = [code for code in _callers(frame) if _file(code) is not None]
        files = [_file(code) for code in callers]
        waiting = {code.co_qualname for code in callers}
        if file in files or waiting & {*OWN_WORK, "Engine.step"} or frame.f_code.co_qualname in OWN_WORK:
            return
        if not _is_followed(frame):
            return
        source, caller = (files[0] or "", callers[0].co_qualname) if callers else ("event loop", "")
        self.hops.setdefault((source, file), f"{source} {caller} -> {file} {frame.f_code.co_qualname}")


def _callers(frame: FrameType) -> list[CodeType]:
    codes, before = [], frame.f_back
    while before is not None:
        codes.append(before.f_code)
        before = before.f_back
    return codes


@functools.cache
def _file(code: CodeType) -> str | None:
    path = Path(code.co_filename)
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else None


def _is_followed(frame: FrameType) -> bool:
    found: Any = sys.modules.get(frame.f_globals["__name__"])
    for name in frame.f_code.co_qualname.split("."):
        if name == "<lambda>":
            return False
        found = inspect.getattr_static(found, name, None)
    return not isinstance(found, property | functools.cached_property)


async def traced(watch: Watch) -> None:
    """Starts a server, asks it twice, and watches the second request: by then nothing is done for the first time."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(PACKAGE / "demo_data" / "model")
        settings = Settings(model=model, engine="thread", host="127.0.0.1", port=0, store=Path(folder))
        with bound_socket("127.0.0.1", 0) as listener:
            await _asked(watch, settings, listener)


async def _asked(watch: Watch, settings: Settings, listener: socket.socket) -> None:
    server = asyncio.create_task(run_server(settings, listener))
    async with aiohttp.ClientSession(f"http://127.0.0.1:{listener.getsockname()[1]}") as http:
        while not await _is_ready(http):
            assert not server.done(), server.exception()
            await asyncio.sleep(0.1)
        await _ask(http)
        await asyncio.sleep(0.2)
        watch.is_on = True
        sys.setprofile(watch)
        await _ask(http)
        await asyncio.sleep(0.2)
        watch.is_on = False
        sys.setprofile(None)
    server.cancel()
    await asyncio.gather(server, return_exceptions=True)


async def _is_ready(http: aiohttp.ClientSession) -> bool:
    try:
        async with http.get("/ready") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def _ask(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/chat/completions", json=BODY) as response:
        text = await response.text()
        assert text.count("data: ") >= NUM_TOKENS, text


def measured() -> dict[str, Any]:
    """The figures of one traced request."""
    watch = Watch()
    setting: Callable[[Any], None] = threading.setprofile  # for the engine's thread, which starts later
    setting(watch)
    asyncio.run(traced(watch))
    counted = [call for (_, file), call in watch.hops.items() if file.startswith(COUNTED)]
    files = {file for pair in watch.hops for file in pair if file.startswith(COUNTED)}
    numbers = {call: f"{number:3} {call}" for number, call in enumerate(counted, start=1)}
    return {
        "hops": len(counted),
        "files": len(files),
        "generators_per_token": sorted(name for name, count in watch.resumed.items() if count >= NUM_TOKENS),
        "way": [numbers.get(call, f"    {call}") for call in watch.hops.values()],
        "what each file is for": {file: _purpose(file) for _, file in watch.hops if file.startswith(COUNTED)},
    }


def _purpose(file: str) -> str:
    """The first line of a file's docstring."""
    text = ast.get_docstring(ast.parse((PACKAGE / file).read_text())) or ""
    return text.partition("\n")[0]


def main() -> None:
    """Prints the way as JSON; with `--write` a file keeps it under a label."""
    parser = argparse.ArgumentParser(description="Hops of one streamed chat completion.")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--label", default="after")
    options = parser.parse_args()
    figures = {"command": "python scripts/hops.py", **measured()}
    print(json.dumps(figures, indent=1))
    if options.write is not None:
        known = json.loads(options.write.read_text()) if options.write.exists() else {}
        options.write.write_text(json.dumps({**known, options.label: figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
