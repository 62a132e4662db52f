"""The two tiers of the suite: what the default one takes, and what only `pytest -m nightly` does (docs/testing.md).

A test marked `nightly` runs in the nightly tier alone, and so do most cases of one marked `crossed`: by day each two
values of its parameters meet once, of two parameters each value is there once. Of the cases of one marked `many(n)` n
run by day, spread over all of them: these are many inputs to one rule. A search (a property test of Hypothesis,
or one marked `search`) runs in both, and is longer at night. A part (PARTS) runs by night, and by day when anything
that it rests on changed since the commit that `--since` finds; without that option, or where git cannot tell, whatever
changed.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import pytest
from _pytest.mark import ParameterSet
from hypothesis import HealthCheck, settings

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]

# The machine may be busy, and the fixtures used with @given hold no state between examples.
_STEADY = settings(
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)
settings.register_profile("default", _STEADY, max_examples=15, derandomize=True, database=None)
settings.register_profile("nightly", _STEADY, max_examples=400)


def is_default(config: pytest.Config) -> bool:
    """True if the selected tests are those of the default tier."""
    return "not nightly" in config.option.markexpr


def is_search(item: pytest.Item) -> bool:
    """True if the test tries as many examples as its tier allows."""
    function = getattr(item, "obj", None)
    return getattr(function, "is_hypothesis_test", False) or item.get_closest_marker("search") is not None


def mostly_nightly(values: Iterable[object], *by_default: object) -> list[ParameterSet]:
    """All values for the nightly tier, those of `by_default` for the default one; a tuple has a value per parameter."""
    marks = {True: (), False: (pytest.mark.nightly,)}
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks[value in by_default])
        for value in values
    ]


def cover(cases: Sequence[Mapping[str, int]]) -> list[int]:
    """Which of the cases, by themselves, show each value of each parameter; of three parameters or more, each pair of
    values, of two parameters, that the cases have. Parameters that follow from another one count with it.
    """
    columns = sorted({_ranks([case[name] for case in cases]) for name in cases[0]})
    varying = [c for c in columns if not any(_follows(c, other) for other in columns if other != c)]
    values = [list(enumerate(row)) for row in zip(*varying, strict=True)]
    at_once = max(1, min(2, len(varying) - 1))
    shown = [set(combinations(row, at_once)) for row in values]
    missing: set[tuple[tuple[int, int], ...]] = set().union(*shown)
    chosen: list[int] = []
    uses: Counter[tuple[int, int]] = Counter()
    while missing:
        best = max(range(len(shown)), key=lambda i: (len(shown[i] & missing), -sum(uses[value] for value in values[i])))
        missing -= shown[best]
        uses.update(values[best])
        chosen.append(best)
    return sorted(chosen) or [0]


def spread(count: int, most: int) -> list[int]:
    """At most so many of `count` places, the first, the last and others at even distances."""
    step = (count - 1) / max(1, most - 1)
    return list(range(count)) if count <= most else [round(place * step) for place in range(most)]


def _follows(column: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """True if a value of the other column says which value of this one stands beside it."""
    return len(set(zip(other, column, strict=True))) == len(set(other))


def _ranks(values: Sequence[int]) -> tuple[int, ...]:
    """Each value's place among them, the same in every process."""
    places = {value: place for place, value in enumerate(dict.fromkeys(values))}
    return tuple(places[value] for value in values)


def by_tier(default: T, nightly: T) -> T:
    """What a search does in the tier that runs."""
    return default if settings().derandomize else nightly


def num_examples() -> int:
    """How many examples a search of the tier tries, unless a test says otherwise."""
    return int(settings().max_examples)


@dataclass(frozen=True)
class Part:
    """Tests, by the beginnings of their ids, and what they rest on beside what they import: beginnings of paths.

    `in_process`: they run nothing but what they import, so what that imports in turn counts, too. Others start servers,
    which are made of everything: they run by day for the sake of what is named and what they import themselves.
    """

    name: str
    tests: tuple[str, ...]
    rests_on: tuple[str, ...]
    in_process: bool = False

    def is_changed_by(self, files: Collection[str]) -> bool:
        """True if one of the files is of the part, of what it rests on, or of what every part rests on."""
        own = (test.partition("::")[0] for test in self.tests)
        beginnings, imported = (*own, *self.rests_on, *ALL_REST_ON), self.imported()
        return any(file.startswith(beginnings) or file in imported for file in files)

    @functools.cache  # noqa: B019  of a few parts
    def imported(self) -> set[str]:
        """The files that its own import, and those of what it rests on outside the package, and theirs in turn; those
        of the package only if it runs in process.
        """
        places = (place for place in (*self.tests, *self.rests_on) if not place.startswith("lora_serve/"))
        found = (path for place in places for path in ROOT.glob(place.partition("::")[0] + "*"))
        waiting = [file for path in found for file in (path.rglob("*.py") if path.is_dir() else [path])]
        names: set[str] = set()
        while waiting:
            file = waiting.pop()
            new = _imported_by(file) - names
            names |= new
            waiting += [ROOT / name for name in new if self.in_process or not name.startswith("lora_serve/")]
        return names


@functools.cache
def _imported_by(file: Path) -> set[str]:
    """The repository's files that are run when a file is imported, but for what these import."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())) if file.suffix == ".py" else ():
        named = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            named = [f"{node.module}.{name}" for name in named]
        for words in (name.split(".") for name in named):
            places = ("/".join(words[:end]) for end in range(1, len(words) + 1))
            found.update(path for place in places for path in (f"{place}.py", f"{place}/__init__.py"))
    return {path for path in found if (ROOT / path).is_file()}


PARTS = (
    Part("console", ("tests/console/",),
         ("lora_serve/console/", "lora_serve/server/console", "lora_serve/core/live", "lora_serve/commands/demo")),
    Part("fleet", ("tests/fleet/", "tests/engine_host/fleet/"),
         ("lora_serve/engine_host/", "lora_serve/client/", "tests/client/", "tests/engine_host/",
          "tests/ray_cluster.py")),
    Part("deploy", ("tests/deploy/",),
         ("deploy/", "docker/", "docs/deploy", "lora_serve/core/setting", "lora_serve/server/telemetry/")),
    Part("benchmarks", ("tests/benchmarks/", "tests/commands/bench/", "tests/simulate/"),
         ("benchmarks/", "lora_serve/commands/bench/", "lora_serve/simulate/", "docs/explanation/performance",
          "docs/explanation/simulation")),
    Part("docs", ("tests/docs/test_code_blocks.py", "tests/docs/test_how_to_add.py", "tests/docs/test_install.py",
                  "tests/docs/test_release.py", "tests/docs/test_site.py::test_site_builds"),
         ("docs/", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml", "scripts/docs", "scripts/release",
          "lora_serve/cli.py")),
    Part("demo", ("tests/demo/", "tests/commands/test_demo"),
         ("lora_serve/demo_data/", "lora_serve/commands/demo", "scripts/demo", "scripts/train")),
    Part("wheel", ("tests/test_wheel.py",), ("setup.py", "lora_serve/model/native/", "lora_serve/__init__.py")),
    Part("kernels", ("tests/model/native/", "tests/model/test_triton_programs.py", "tests/model/fusion/test_levels.py",
                     "tests/model/system/test_team_waits.py", "tests/e2e/test_speculation.py::test_a_gpu"),
         ("lora_serve/model/", "lora_serve/engine/acceptance.py", "lora_serve/engine/drafter.py", "tests/model/")),
    Part("model", ("tests/model/", "tests/contracts/test_attention.py", "tests/contracts/test_lora_kernel.py",
                   "tests/test_peft_kinds.py"),
         ("lora_serve/model/", "lora_serve/adapters/", "lora_serve/core/", "lora_serve/engine/", "lora_serve/text/",
          "lora_serve/engine_host/", "docs/reference/adapters.md", "docs/reference/models.md"), in_process=True),
    Part("text", ("tests/text/", "tests/contracts/test_reasoning.py", "tests/contracts/test_tool_calls.py"),
         ("lora_serve/text/", "lora_serve/core/"), in_process=True),
    Part("adapters", ("tests/adapters/", "tests/contracts/test_catalog.py", "tests/contracts/test_adapter"),
         ("lora_serve/adapters/", "lora_serve/core/", "lora_serve/commands/registry"), in_process=True),
    Part("engine", ("tests/engine/", "tests/routing/", "tests/contracts/test_policy.py",
                    "tests/contracts/test_router.py", "tests/contracts/test_eviction.py"),
         ("lora_serve/engine/", "lora_serve/routing/", "lora_serve/adapters/", "lora_serve/core/"), in_process=True),
    Part("tenancy", ("tests/tenancy/",), ("lora_serve/tenancy/", "lora_serve/adapters/", "lora_serve/core/"),
         in_process=True),
)  # fmt: skip
# The suite's own frame, what is installed, and what servers of every part are started with.
ALL_REST_ON = ("pyproject.toml", "constraints.txt", "scripts/install", "scripts/test", "tests/conftest.py",
               "tests/tiers.py", "tests/engine_choice.py", "tests/oracle.py", "tests/e2e/conftest.py",
               "lora_serve/commands/server_process.py", "lora_serve/app/launch.py")  # fmt: skip


def add_options(parser: pytest.Parser) -> None:
    words = "leave out the parts that rest on nothing that changed since that commit; auto: one that fits"
    parser.getgroup("lora_serve").addoption("--since", metavar="COMMIT", help=words)


def register_markers(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "crossed: by day a cover of the cases of several parameters")
    config.addinivalue_line("markers", "many(n): by day n of the cases, spread over all of them")


def choose(config: pytest.Config) -> None:
    """Notes which parts are left out; a worker has it from the process that started it, with the options."""
    if not hasattr(config.option, "left_out"):
        found = changes(config.option.since) if config.option.since else None
        config.option.left_out = found.untouched() if found else []
        config.option.words_of_parts = found.report() if found else ""


def mark(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    """By night searches and all parts run in the nightly tier, too; by day parts that are left out run there alone."""
    by_night = not is_default(config)
    for item in _left_to_the_night(items):
        item.add_marker(pytest.mark.nightly)
    for item in items:
        part = part_of(item.nodeid)
        if (by_night and (part or is_search(item))) or (part and part.name in config.option.left_out):
            item.add_marker(pytest.mark.nightly)


def _left_to_the_night(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """The cases of tests with many that do not run by day."""
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if marks & {"crossed", "many"} and "nightly" not in marks:
            found[item.nodeid.partition("[")[0]].append(item)
    for cases in found.values():
        many = cases[0].get_closest_marker("many")
        parameters = [{name: id(value) for name, value in case.callspec.params.items()} for case in cases]
        by_day = spread(len(cases), *many.args) if many else cover(parameters)
        yield from (case for index, case in enumerate(cases) if index not in by_day)


def part_of(nodeid: str) -> Part | None:
    """The part that a test belongs to."""
    return next((part for part in PARTS if nodeid.startswith(part.tests)), None)


@dataclass(frozen=True)
class Changes:
    """The files that changed since a commit; None: nobody can tell. `words`: since when, or why nobody can."""

    files: frozenset[str] | None
    words: str

    def untouched(self) -> list[str]:
        """The names of the parts that need not run by day."""
        return [] if self.files is None else [part.name for part in PARTS if not part.is_changed_by(self.files)]

    def report(self) -> str:
        """What is left out, and why, for the head of the output."""
        if self.files is None:
            return f"every part runs: {self.words}"
        left = ", ".join(self.untouched()) or "no part"
        return f"{len(self.files)} files changed since {self.words}; left to the night: {left}"


def changes(since: str, root: Path = ROOT) -> Changes:
    """What changed since a commit; `none`: everything; `auto`: $TESTS_SINCE, else what upstream has not yet, or since
    the branch left main, or since the last tag.

    What is not committed has changed, too. A commit that this clone does not have (a shallow one, an upstream that was
    rewritten) leaves the question open.
    """

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(root), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    def commit(name: str) -> str | None:
        return git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")

    words = os.environ.get("TESTS_SINCE", "") if since == "auto" else since
    if words == "none":
        return Changes(None, "as was asked for")
    if not words:
        head, main = commit("HEAD"), commit("origin/main") or commit("main")
        words = git("merge-base", "HEAD", main) if main else None
        if words in (None, head):  # one commit of many would tell of the least part: the last release does, if any
            words = git("describe", "--tags", "--abbrev=0") or ""
    if not words:
        return Changes(None, "no commit says since when")
    base = commit(words)
    changed = base and git("diff", "--name-only", "--no-renames", base)
    new = git("ls-files", "--others", "--exclude-standard", "--full-name")
    if base is None or changed is None or new is None:
        return Changes(None, f"git knows no commit {words!r} here")
    name = base[:8] if base == words else f"{words} ({base[:8]})"
    return Changes(frozenset(f"{changed}\n{new}".split("\n")) - {""}, name)
