"""Measures the house: lines and files, files per fact, the roads of two calls, and where the tests' time goes.

    python scripts/meters.py [--tests JUNIT_XML ...] [--note TEXT] [--write FILE]

Sizes: lines and files of the package's folders, with and without `__init__.py`.

Facts: in how many files each setting and each wire field is named. A wire field is a property of a schema of
/openapi.json. Names of one word are left out: `model` or `name` is a word of the language, too. A flag's spelling
(`--max-lora-rank`) counts as the setting's; files of the console (JavaScript) are counted beside those in Python.

Roads: a real server with its engine on a thread answers a streamed chat on the bundled model, and registers an
adapter; `sys.setprofile` watches the calls.

- A room is a file. A hop is a call into a file of the road's folders from another file of `lora_serve` (or from the
  event loop, or a thread's start); each pair of files counts once. Not counted: properties and lambdas, which a reader
  does not follow; a call back into a file that waits for this call (a callback); what the server does for itself
  meanwhile; the engine's step. What is asked of other folders is in the list without a number.
- A return is a hop into a room that was visited before. A climb is a call from a file of a lower floor (import-linter's
  layers) into one of a higher floor, whichever the folders, callbacks included.
- Generators per token: the async generators that are resumed for every token between the engine and the socket.

Tests: seconds and number per test file, from reports of `pytest --junitxml`; setup and teardown are part of a test.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import functools
import inspect
import json
import re
import sys
import tempfile
import threading
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import aiohttp

import lora_serve
from lora_serve.app.launch import run_server
from lora_serve.core.settings import Settings
from lora_serve.server.sockets.listener import bound_socket

PACKAGE = Path(lora_serve.__file__).parent
SETTINGS = "core/setting*"  # where classes declare settings
WORST = 40
OWN_WORK = {"kept_going", "ThreadHost.ping"}  # what the server does for itself: its tasks, its watch over the engine
NUM_TOKENS = 12
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "stream": True, "max_tokens": NUM_TOKENS, "temperature": 0}
WARM_UP, REGISTERED = "harbor/extract", "acme/sql"  # bundled adapters: the first call does what is done once
ADMIN_KEY = "of-the-meters"
DECIDED_IN = ("server/admin/", "server/background/", "adapters/registration/", "adapters/catalog/")  # of registrations

Http = aiohttp.ClientSession
Ask = Callable[[Http], Awaitable[None]]


def sizes() -> dict[str, Any]:
    """Lines and files of the package, of each of its folders, and of each folder's folders with all below them."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(("lines", "files", "files_without_init"), 0))
    for path, text in _sources(".py"):
        for folder in (".", *map(str, list(Path(path).parents)[:-1][-2:])):
            found[folder]["lines"] += text.count("\n")
            found[folder]["files"] += 1
            found[folder]["files_without_init"] += not path.endswith("__init__.py")
    return {"package": found.pop("."), "folders": dict(sorted(found.items()))}


@functools.cache
def _sources(suffix: str) -> list[tuple[str, str]]:
    """The package's files: path below it, and text."""
    files = [path for path in sorted(PACKAGE.rglob(f"*{suffix}")) if "vendor" not in path.parts]
    return [(path.relative_to(PACKAGE).as_posix(), path.read_text()) for path in files]


def facts(wire_fields: Iterable[str]) -> dict[str, Any]:
    """How many files name the facts of each kind: the mean, and the worst."""
    return {"settings": _spread(set(_settings())), "wire_fields": _spread(set(wire_fields))}


def _settings() -> Iterator[str]:
    paths = [*PACKAGE.glob(SETTINGS + ".py"), *PACKAGE.glob(SETTINGS + "/*.py")]
    for node in (node for path in paths for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.ClassDef):
            fields = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
            yield from (field.id for field in fields if isinstance(field, ast.Name))


def _spread(names: set[str]) -> dict[str, Any]:
    long = sorted(name for name in names if "_" in name.strip("_"))
    files = {suffix: Counter(_named_in(suffix, frozenset(long))) for suffix in (".py", ".js")}
    ranked = sorted(long, key=lambda name: (-files[".py"][name], -files[".js"][name], name))
    return {
        "names": len(long),
        "of_one_word": len(names) - len(long),
        "files_per_name": round(files[".py"].total() / max(1, len(long)), 2),
        "worst": {name: {"python": files[".py"][name], "javascript": files[".js"][name]} for name in ranked[:WORST]},
    }


def _named_in(suffix: str, names: frozenset[str]) -> Iterator[str]:
    """Each of the names as often as files have it."""
    for _, text in _sources(suffix):
        yield from names & {word.strip("-").replace("-", "_") for word in re.findall(r"[\w-]+", text)}


class Watch:
    """The notes of one road."""

    def __init__(self) -> None:
        self.hops: dict[tuple[str, str], str] = {}  # (caller's file, called file) -> the first call
        self.climbs: dict[tuple[str, str], str] = {}
        self.resumed: Counter[str] = Counter()  # calls of async generators

    def note(self, frame: FrameType, file: str) -> None:
        """Takes in a call into a file of the package."""
        if frame.f_code.co_flags & inspect.CO_ASYNC_GENERATOR:
            self.resumed[f"{file} {frame.f_code.co_qualname}"] += 1
        callers = [code for code in _callers(frame) if _file(code) is not None]
        names = {code.co_qualname for code in [frame.f_code, *callers]}
        if names & OWN_WORK or "Engine.step" in names - {frame.f_code.co_qualname} or not _is_followed(frame):
            return
        files = [_file(code) or "" for code in callers] or ["event loop"]
        caller = callers[0].co_qualname if callers else ""
        pair, call = (files[0], file), f"{files[0]} {caller} -> {file} {frame.f_code.co_qualname}"
        if callers and _floor(file) > _floor(files[0]):
            self.climbs.setdefault(pair, call)
        if file not in files:
            self.hops.setdefault(pair, call)

    def figures(self, folders: tuple[str, ...]) -> dict[str, Any]:
        """The road's figures, and its hops by number."""
        counted = {pair: call for pair, call in self.hops.items() if pair[1].startswith(folders)}
        rooms = len({file for _, file in counted})
        numbers = {call: f"{number:3} {call}" for number, call in enumerate(counted.values(), start=1)}
        return {
            "folders": folders,
            "hops": len(counted),
            "rooms": rooms,
            "returns": len(counted) - rooms,  # the first hop into a room is none
            "climbs": len(self.climbs),
            "rooms_of_all_folders": len({file for _, file in self.hops}),
            "generators_per_token": sorted(name for name, count in self.resumed.items() if count >= NUM_TOKENS),
            "way": [numbers.get(call, f"    {call}") for call in self.hops.values()],
            "climbing": list(self.climbs.values()),
        }


class Profile:
    """A profile function of every thread; `watch` notes what it sees."""

    watch: Watch | None = None

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if self.watch is not None and event == "call" and (file := _file(frame.f_code)) is not None:
            self.watch.note(frame, file)


def _callers(frame: FrameType) -> Iterator[CodeType]:
    while frame.f_back is not None:
        frame = frame.f_back
        yield frame.f_code


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


@functools.cache
def _floors() -> dict[str, int]:
    contracts = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract for contract in contracts if contract["type"] == "layers")["layers"]
    return {room: floor for floor, layer in enumerate(reversed(layers)) for room in re.findall(r"\w+", layer)}


def _floor(file: str) -> int:
    return _floors()[file.partition("/")[0].removesuffix(".py")]


async def _chat(http: Http) -> None:
    async with http.post("/v1/chat/completions", json=CHAT) as response:
        text = await response.text()
        assert text.count("data: ") >= NUM_TOKENS, text


async def _register(http: Http, adapter: str = REGISTERED) -> None:
    source = str(PACKAGE / "demo_data" / "adapters" / adapter)
    body, key = {"id": adapter, "source": source}, {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with http.post("/admin/adapters", json=body, headers=key) as response:
        assert response.status == 201, await response.text()


async def served(profile: Profile) -> tuple[set[str], dict[str, Any]]:
    """The wire's fields and the roads, by a server that has done each call before: nothing is for the first time."""
    demo = PACKAGE / "demo_data"
    with tempfile.TemporaryDirectory() as folder, bound_socket("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        places = {"model": str(demo / "model"), "store": Path(folder), "adapter_root": [demo / "adapters"]}
        settings = Settings(**places, port=0, admin_key=ADMIN_KEY)
        server = asyncio.create_task(run_server(settings, listener))
        async with Http(url) as http:
            while not await _is_ready(http):
                assert not server.done(), server.exception()
                await asyncio.sleep(0.1)
            await _chat(http)
            roads = {"chat": await _followed(profile, http, _chat, ("server/", "text/", "client/"))}
            await _register(http, WARM_UP)
            roads["registration"] = await _followed(profile, http, _register, DECIDED_IN)
            async with http.get("/openapi.json") as response:
                fields = set(_properties(await response.json()))
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)
    return fields, roads


async def _is_ready(http: Http) -> bool:
    try:
        async with http.get("/ready") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def _followed(profile: Profile, http: Http, ask: Ask, folders: tuple[str, ...]) -> dict[str, Any]:
    await asyncio.sleep(0.2)
    profile.watch = watch = Watch()
    sys.setprofile(profile)
    await ask(http)
    await asyncio.sleep(0.2)
    sys.setprofile(None)
    profile.watch = None
    return watch.figures(folders)


def _properties(document: Any) -> Iterator[str]:
    if isinstance(document, dict):
        if isinstance(properties := document.get("properties"), dict):
            yield from properties
        document = list(document.values())
    if isinstance(document, list):
        for part in document:
            yield from _properties(part)


def tests(reports: Iterable[Path]) -> dict[str, Any]:
    """Seconds and number of tests per file, the longest first."""
    seconds: dict[str, float] = defaultdict(float)
    number: Counter[str] = Counter()
    for report in reports:
        for case in ET.parse(report).iter("testcase"):
            words = case.get("classname", "").split(".")
            file = "/".join(words[: next(i for i, word in enumerate(words, 1) if word.startswith("test_"))]) + ".py"
            seconds[file] += float(case.get("time", 0))
            number[file] += 1
    longest = sorted(seconds, key=lambda file: -seconds[file])
    files = {file: {"seconds": round(seconds[file], 2), "tests": number[file]} for file in longest}
    return {"seconds": round(sum(seconds.values()), 1), "tests": number.total(), "files": files}


def main() -> None:
    """Prints the figures as JSON; with `--write` a file keeps them."""
    parser = argparse.ArgumentParser(description="Meters of the house.")
    parser.add_argument("--tests", nargs="+", type=Path, default=[], metavar="JUNIT_XML")
    parser.add_argument("--note", default="", help="of the tests' run: beside what, of which commit")
    parser.add_argument("--write", type=Path, metavar="FILE")
    options = parser.parse_args()
    profile = Profile()
    threading.setprofile(profile)  # of threads that start later
    fields, roads = asyncio.run(served(profile))
    found = {"command": "python scripts/meters.py", "sizes": sizes(), "facts": facts(fields), "roads": roads}
    if options.tests:
        found["tests"] = {"note": options.note, **tests(options.tests)}
    text = json.dumps(found, indent=1)
    print(text)
    if options.write is not None:
        options.write.write_text(text + "\n")


if __name__ == "__main__":
    main()
