"""By day a part is left out only when nothing that it rests on changed; what is left out by day runs by night."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.test_mutations import MUTATIONS
from tests.tiers import ALL_REST_ON, PARTS, ROOT, Changes, Part, changes, choose, cover, mark, part_of, spread

NAMES = [part.name for part in PARTS]
CONSOLE = next(part for part in PARTS if part.name == "console")
BY_DAY, BY_NIGHT = "not nightly", "nightly"


class Repository:
    """One whose main has two commits, and whose branch `own` one more."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "--quiet", "--initial-branch", "main")
        self.first = self.commit("docs/index.md")
        self.second = self.commit("lora_serve/core/errors.py")

    def git(self, *arguments: str) -> str:
        names = {f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        command = ["git", "-C", str(self.root), *arguments]
        return subprocess.run(
            command, env=os.environ | names, capture_output=True, text=True, check=True
        ).stdout.strip()

    def write(self, name: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)

    def commit(self, name: str) -> str:
        self.write(name)
        self.git("add", ".")
        self.git("commit", "--quiet", "--message", name)
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    monkeypatch.delenv("TESTS_SINCE", raising=False)
    return Repository(tmp_path)


def test_on_main_what_came_after_the_last_release_and_what_is_not_committed_have_changed(
    repository: Repository,
) -> None:
    assert changes("auto", repository.root).files is None  # nothing was ever released: every part runs
    repository.git("tag", "v1", "HEAD^")
    assert changes("auto", repository.root).files == {"lora_serve/core/errors.py"}
    repository.write("docs/new.md")
    repository.write("lora_serve/core/errors.py")
    (repository.root / "docs" / "index.md").write_text("other")
    found = changes("auto", repository.root)
    assert found.files == {"lora_serve/core/errors.py", "docs/index.md", "docs/new.md"}
    assert repository.first[:8] in found.report()


def test_on_a_branch_all_of_its_commits_have_changed(repository: Repository) -> None:
    repository.git("checkout", "--quiet", "-b", "own")
    for name in ("deploy/one.yaml", "deploy/two.yaml"):
        repository.commit(name)
    repository.git("mv", "deploy/two.yaml", "deploy/three.yaml")
    assert changes("auto", repository.root).files == {"deploy/one.yaml", "deploy/three.yaml"}
    assert changes("HEAD", repository.root).files == {"deploy/two.yaml", "deploy/three.yaml"}


def test_main_that_is_ahead_of_its_upstream_is_held_against_that(repository: Repository, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    repository.git("clone", "--quiet", str(repository.root), str(clone))
    own = Repository.__new__(Repository)
    own.root = clone
    own.commit("docs/a.md")
    own.commit("docs/b.md")
    assert changes("auto", clone).files == {"docs/a.md", "docs/b.md"}


def test_what_is_asked_for_comes_first(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTS_SINCE", repository.second)
    assert changes("auto", repository.root).files == frozenset()
    assert changes(repository.first, repository.root).files == {"lora_serve/core/errors.py"}


@pytest.mark.parametrize("since", ["auto", "none", "0" * 40, "no-such-branch", "--help"])
def test_where_git_cannot_tell_every_part_runs(repository: Repository, tmp_path: Path, since: str) -> None:
    shallow = tmp_path / "shallow"
    repository.git("clone", "--quiet", "--depth", "1", f"file://{repository.root}", str(shallow))
    for root in (shallow, tmp_path / "no-repository"):
        found = changes(since, root)
        assert found.files is None
        assert found.untouched() == []
        assert "every part runs" in found.report()


@pytest.mark.parametrize("part", PARTS, ids=NAMES)
def test_part_is_left_out_unless_something_that_it_rests_on_changed(part: Part) -> None:
    assert part.name in Changes(frozenset({"lora_serve/server/middleware.py"}), "").untouched()
    for place in (*(test.partition("::")[0] for test in part.tests), *part.rests_on, *ALL_REST_ON):
        assert part.name not in Changes(frozenset({f"{place}x.py", "LICENSE"}), "").untouched()


@pytest.mark.parametrize("part", PARTS, ids=NAMES)
def test_everything_that_a_part_names_is_there(part: Part) -> None:
    for place in (*part.tests, *part.rests_on, *ALL_REST_ON):
        file, _, test = place.partition("::")
        assert (ROOT / file).is_dir() if file.endswith("/") else list(ROOT.glob(f"{file}*")), place
        assert not test or f"def {test}" in (ROOT / file).read_text()


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("console", "lora_serve/core/live.py"),
        ("benchmarks", "lora_serve/model/kv_cache.py"),  # by benchmarks/
        ("kernels", "lora_serve/model/frozen_linear.py"),
        ("fleet", "tests/e2e/streams.py"),
        ("model", "tests/old_experts.py"),  # by tests/oracle.py
        ("adapters", "lora_serve/tenancy/directory.py"),  # by lora_serve/commands/
        ("tenancy", "lora_serve/engine/__init__.py"),  # by lora_serve/adapters/
    ],
)
def test_part_rests_on_the_modules_that_it_imports(name: str, file: str) -> None:
    assert (ROOT / file).exists()
    assert name not in Changes(frozenset({file}), "").untouched()


@pytest.mark.parametrize("file", ["benchmarks/results/new.json", "docs/new.md", "tests/console/new.json"])
def test_new_file_that_no_module_imports_brings_the_tests_of_its_folder(repository: Repository, file: str) -> None:
    """A result that the page of results does not name is met by the test of that page, before and after its commit."""
    part = next(part for part in PARTS if file.startswith((*part.tests, *part.rests_on)))
    repository.write(file)
    assert part.name not in changes("HEAD", repository.root).untouched()
    repository.git("tag", "v1")
    repository.commit(file)
    assert part.name not in changes("auto", repository.root).untouched()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "_"))
def test_break_of_a_file_is_met_by_the_tests_that_must_see_it(mutation: Any) -> None:
    """Those of scripts/mutations.py: a part with such a test runs by day once the file has changed."""
    asked = tuple(f"tests/{name}" for name in mutation.tests.split())
    parts = [part for part in PARTS if any(test.startswith(asked) or test in asked for test in part.tests)]
    parts += [part for place in asked if (part := part_of(place)) is not None]
    assert all(part.is_changed_by({f"lora_serve/{mutation.file}"}) for part in parts), [part.name for part in parts]


@pytest.mark.parametrize(
    ("sizes", "num_cases"), [((8, 3, 2, 2, 2), 24), ((31, 4), 31), ((5,), 5), ((3, 3, 3), 12), ((1, 1), 1)]
)
def test_cover_has_each_pair_of_values_and_few_cases(sizes: tuple[int, ...], num_cases: int) -> None:
    cases = [dict(zip("abcde", case, strict=False)) for case in product(*map(range, sizes))]
    found = [list(cases[index].values()) for index in cover(cases)]
    assert len(found) <= num_cases
    if len(sizes) > 2:
        for first, second in combinations(range(len(sizes)), 2):
            assert len({(case[first], case[second]) for case in found}) == sizes[first] * sizes[second]
    assert [len({case[place] for case in found}) for place in range(len(sizes))] == list(sizes)


def test_parameters_that_go_together_are_one_and_places_of_objects_mean_nothing() -> None:
    together = [{"name": 900 - a, "value": 900 - a, "build": b} for a in range(6) for b in (7, 3)]
    turned = [{"name": a + 50, "value": a, "build": -b} for a in range(6) for b in (7, 3)]
    assert cover(together) == cover(turned)
    assert len(cover(together)) == 6
    following = [{"heads": 10 + a, "groups": 10 + a // 2, "build": b} for a in range(4) for b in range(3)]
    assert len(cover(following)) == 4


@pytest.mark.parametrize(
    ("count", "most", "wanted"), [(10, 4, [0, 3, 6, 9]), (3, 8, [0, 1, 2]), (9, 1, [0]), (5, 2, [0, 4])]
)
def test_some_of_many_are_spread_over_all(count: int, most: int, wanted: list[int]) -> None:
    assert spread(count, most) == wanted


def collected(*nodeids: str, marked: Sequence[pytest.Mark] = ()) -> list[Any]:
    class Item(SimpleNamespace):
        def get_closest_marker(self, name: str) -> Any:
            return next((mark for mark in self.marked if mark.name == name), None)

        def iter_markers(self) -> Any:
            return iter(self.marked)

        def add_marker(self, marker: Any) -> None:
            self.marks.append(marker.name)

    return [Item(nodeid=nodeid, marks=[], marked=marked) for nodeid in nodeids]


@pytest.mark.parametrize("left_out", [[], ["console"]])
@pytest.mark.parametrize("tier", [BY_DAY, BY_NIGHT, ""])
def test_every_test_is_in_the_tier_of_the_day_or_of_the_night(tier: str, left_out: list[str]) -> None:
    items = collected("tests/console/test_shell.py::a", "tests/fleet/test_smoke.py::b", "tests/server/test_chat.py::c")
    config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=tier, left_out=left_out))
    mark(config, items)
    nightly = [bool(item.marks) for item in items]
    assert nightly == ([bool(left_out), False, False] if tier == BY_DAY else [True, True, False])


def test_of_many_cases_some_run_by_day_and_the_others_by_night() -> None:
    names = [f"tests/server/test_chat.py::a[{number}]" for number in range(9)]
    items = collected(*names, marked=[pytest.mark.many(3).mark])
    for number, item in enumerate(items):
        item.callspec = SimpleNamespace(params={"number": number})
    mark(SimpleNamespace(option=SimpleNamespace(markexpr=BY_DAY, left_out=[])), items)  # type: ignore[arg-type]
    assert [number for number, item in enumerate(items) if not item.marks] == [0, 4, 8]


def test_workers_leave_out_what_the_process_that_started_them_does() -> None:
    option = SimpleNamespace(since="no-such-commit", left_out=["console"], words_of_parts="")
    choose(SimpleNamespace(option=option))  # type: ignore[arg-type]
    assert option.left_out == ["console"]


def test_tests_of_parts_are_known() -> None:
    assert part_of("tests/console/live/test_hub.py::test_viewers_are_bounded") is CONSOLE
    kernels = part_of("tests/e2e/test_speculation.py::test_a_gpu_s_programs_give_the_same_tokens")
    assert kernels is part_of("tests/model/native/test_layers.py::test_gate_is_torchs[silu-8]") is not None
    assert part_of("tests/model/test_grammars.py::test_a") not in (kernels, None)
    assert part_of("tests/e2e/test_speculation.py::test_answers_are_those_without_guesses[a]") is None
    assert part_of("tests/server/console/test_engine.py::test_consoles") is None
