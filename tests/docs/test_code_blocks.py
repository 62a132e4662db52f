"""Every code block of the README, the tutorial and the how-to pages runs, and prints what the page shows."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, RUN, blocks, check_page

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "how-to").glob("*.md")),
]
PAGES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "tutorial").glob("*.md"))
SKIPPED = {
    ("README.md", "is the suite itself"),
    ("CONTRIBUTING.md", "installs packages"),
    ("CONTRIBUTING.md", "takes minutes"),
    ("docs/how-to/bench.md", "takes minutes"),
    ("docs/how-to/embeddings.md", "needs a classifier"),
    ("docs/how-to/backup.md", "needs two replicas and a lost Redis"),
    ("docs/how-to/overflow.md", "needs a neighbour and a model of yours"),
    ("docs/how-to/production.md", "needs docker"),
    ("docs/how-to/production.md", "installs packages"),
    ("docs/tutorial/first-server.md", "installs packages"),
}
RUNNING = [
    pytest.param(page, marks=[pytest.mark.nightly] * (page != "README.md"))  # a server or more for each page
    for page in PAGES
    if any(block.is_run for block in blocks(ROOT / page))
]


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder that looks like a clone with an activated environment; what the blocks write stays in it."""
    for name in ("lora_serve", "tests", "docs", "docker", "benchmarks", "constraints.txt", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "demo", tmp_path / "scripts" / "demo")
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    _program(tmp_path / "scripts" / "install", "exit 0")  # everything is installed
    _program(programs / "python", f'exec {sys.executable} "$@"')
    _program(programs / "lora-serve", f'exec {sys.executable} -m lora_serve "$@"')
    _program(programs / "curl", f'exec {shutil.which("curl")} --fail-with-body "$@"')  # a refusal ends the page
    (programs / "activate").write_text("")
    return tmp_path


def _program(path: Path, line: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{line}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", RUNNING)
def test_code_blocks_run_and_print_what_the_page_shows(page: str, workplace: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LORA_SERVE_")}
    environment |= {"PATH": f"{workplace / '.venv' / 'bin'}:{environment['PATH']}", "PYTHONPATH": str(ROOT)}
    check_page(ROOT / page, workplace, environment, tmp_path / "out", timeout=280)


def test_blocks_that_are_not_run_are_few_and_known() -> None:
    skipped = {
        (page, block.mark.removeprefix("test: skip, "))
        for page in PAGES
        for block in blocks(ROOT / page)
        if block.language in RUN and not block.is_run
    }
    assert skipped == SKIPPED
