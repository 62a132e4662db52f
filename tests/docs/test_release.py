"""scripts/release refuses what is not ready, and looks into the wheel that it builds."""

from __future__ import annotations

import importlib.util
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.pages import ROOT

INIT = '"""A package."""\n\n__version__ = "1.2.0"\n'
CLI = "from lora_serve import __version__\n\n\ndef main():\n    print(__version__)\n    return 0\n"
PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "lora-serve"
license = "Apache-2.0"
license-files = ["LICENSE"]
dynamic = ["version"]

[tool.setuptools.dynamic]
version = { attr = "lora_serve.__version__" }

[tool.setuptools]
packages = ["lora_serve"]
"""


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / "scripts" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A small project that is ready for 1.2.0."""
    root = tmp_path / "project"
    files = {
        "lora_serve/__init__.py": INIT,
        "lora_serve/cli.py": CLI,
        "pyproject.toml": PROJECT,
        "LICENSE": "Apache",
        ".gitignore": "dist/\n",
        "CHANGELOG.md": "# Changelog\n\n## Unreleased\n\n## 1.2.0\n\n- New: a thing.\n\n## 1.1.0\n\n- Older.\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(root, "init", "-q", "-b", "main")
    git(root, "config", "user.email", "tests@example.org")
    git(root, "config", "user.name", "tests")
    commit(root)
    return root


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


def commit(root: Path) -> None:
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "A change")


def test_ready_version_is_built_checked_and_tagged_with_its_notes(release: ModuleType, repository: Path) -> None:
    assert release.main(["1.2.0", "--no-isolation"], repository) == 0
    assert (repository / "dist" / "lora_serve-1.2.0-py3-none-any.whl").is_file()
    assert "- New: a thing." in git(repository, "tag", "--list", "-n9", "v1.2.0")
    assert git(repository, "worktree", "list").count("\n") == 1
    assert list(release.in_the_way(repository, "1.2.0")) == ["there is a tag v1.2.0"]


def test_dry_run_tags_nothing_and_tells_what_is_in_the_way(
    release: ModuleType, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "CHANGELOG.md").write_text("## Unreleased\n\n- More.\n")
    assert release.main(["--dry-run", "--no-isolation"], repository) == 0
    said = capsys.readouterr()
    assert "is sound" in said.out
    assert "nothing below `## 1.2.0`" in said.err
    assert "entries below `## Unreleased`" in said.err
    assert "not committed" in said.err
    assert git(repository, "tag") == ""


def test_version_that_is_not_the_packages_own_is_refused_before_anything_is_built(
    release: ModuleType, repository: Path
) -> None:
    assert release.main(["1.3.0"], repository) == 1
    assert not (repository / "dist").exists()


def test_faults_of_a_wheel_are_named(release: ModuleType, repository: Path, tmp_path: Path) -> None:
    wheel = release.build(repository, isolated=False)
    assert list(release.wheel_faults(repository, wheel, "1.2.0")) == []
    with zipfile.ZipFile(wheel) as archive:
        sound = {name: archive.read(name) for name in archive.namelist()}
    spoilt = tmp_path / wheel.name
    for change, fault in (
        ({"lora_serve/cli.py": None}, "lacks lora_serve/cli.py"),
        ({"tests/x.py": b""}, "holds tests/x.py, which is not in the repository"),
        ({"lora_serve/__init__.py": b'__version__ = "9"'}, "its command says '9'"),
        ({"lora_serve-1.2.0.dist-info/licenses/LICENSE": None}, "holds no LICENSE"),
    ):
        with zipfile.ZipFile(spoilt, "w") as archive:
            for name, content in (sound | change).items():
                if content is not None:
                    archive.writestr(name, content)
        assert fault in list(release.wheel_faults(repository, spoilt, "1.2.0"))


def test_repositorys_own_changelog_has_the_packages_version(release: ModuleType) -> None:
    assert release.changelog_section(ROOT, release.package_version(ROOT))
