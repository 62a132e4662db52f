"""Each page of docs/how-to/add: what it adds is written into a copy of the repository and used there."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, check_page

BY_NIGHT = ("adapter-kind", "engine-host", "kernel", "policy")  # torch, a server or a long contract
PAGES = sorted((ROOT / "docs" / "how-to" / "add").glob("*.md"))
RUNNING = [pytest.param(page, marks=[pytest.mark.nightly] * (page.stem in BY_NIGHT)) for page in PAGES]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy that may be changed; what is large is linked."""
    ignored = shutil.ignore_patterns("__pycache__", "demo_data", "*.so")
    shutil.copytree(ROOT / "lora_serve", tmp_path / "lora_serve", ignore=ignored)
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=ignored)
    (tmp_path / "lora_serve" / "demo_data").symlink_to(ROOT / "lora_serve" / "demo_data")
    for name in ("benchmarks", "docs", "scripts", "pyproject.toml", "constraints.txt", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, line in (("python", sys.executable), ("lora-serve", f"{sys.executable} -m lora_serve")):
        (programs / name).write_text(f'#!/usr/bin/env bash\nexec {line} "$@"\n')
        (programs / name).chmod(0o755)
    return tmp_path


def test_pages_are_those_of_the_navigation() -> None:
    assert [page.stem for page in PAGES] == [
        "adapter-kind",
        "engine-host",
        "kernel",
        "policy",
        "router",
        "source",
        "store",
    ]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("page", RUNNING, ids=lambda page: page.stem)
def test_what_the_page_adds_works_as_the_page_says(page: Path, clone: Path, tmp_path: Path) -> None:
    path = f"{clone / 'programs'}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(clone), "PYTHONDONTWRITEBYTECODE": "1"}
    check_page(page, clone, environment, tmp_path / "out", timeout=230)
