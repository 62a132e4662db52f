"""Builds, checks and tags a release; see scripts/release.

The notes of the tag are the version's section of CHANGELOG.md. What stands in the way is named, line by line; the exit
code is then 1, as it is if the wheel is not what it should be.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Exit code."""
    parser = argparse.ArgumentParser(prog="scripts/release", description="Build, check and tag a release.")
    parser.add_argument("version", nargs="?", help="which must be the package's own; default with --dry-run")
    parser.add_argument("--dry-run", action="store_true", help="make no tag, and only tell what stands in its way")
    parser.add_argument("--no-isolation", action="store_true", help="build with the setuptools that is installed")
    options = parser.parse_args(arguments)
    if options.version is None and not options.dry_run:
        parser.error("which version?")
    version = options.version or package_version(root)
    obstacles = list(in_the_way(root, version))
    for line in obstacles:
        print(f"{'would be' if options.dry_run else 'is'} in the way: {line}", file=sys.stderr)
    if obstacles and not options.dry_run:
        return 1
    wheel = build(root, isolated=not options.no_isolation)
    faults = list(wheel_faults(root, wheel, package_version(root)))
    for line in faults:
        print(f"{wheel.name}: {line}", file=sys.stderr)
    if faults:
        return 1
    print(f"{wheel.relative_to(root)} is sound")
    if options.dry_run:
        return 0
    notes = changelog_section(root, version)
    _git(root, "tag", "--annotate", f"v{version}", "--message", f"lora_serve {version}\n\n{notes}")
    print(f"tagged v{version}; now: git push origin v{version}")
    return 0


def package_version(root: Path) -> str:
    """The version that lora_serve/__init__.py states."""
    (version,) = re.findall(r'^__version__ = "(.+)"$', (root / "lora_serve" / "__init__.py").read_text(), re.M)
    return version


def changelog_section(root: Path, name: str) -> str:
    """The text below a heading of CHANGELOG.md; "" if there is none."""
    found = re.search(
        rf"^## {re.escape(name)}\b.*?\n(.*?)(?=^## |\Z)", (root / "CHANGELOG.md").read_text(), re.M | re.S
    )
    return found[1].strip() if found else ""


def in_the_way(root: Path, version: str) -> Iterator[str]:
    """Each reason why this version cannot be tagged now."""
    if version != package_version(root):
        yield f"the package is {package_version(root)}, not {version} (lora_serve/__init__.py)"
    if not changelog_section(root, version):
        yield f"CHANGELOG.md has nothing below `## {version}`"
    if changelog_section(root, "Unreleased"):
        yield "CHANGELOG.md has entries below `## Unreleased`"
    if _git(root, "status", "--porcelain"):
        yield "the working tree has changes that are not committed"
    if _git(root, "tag", "--list", f"v{version}"):
        yield f"there is a tag v{version}"


def build(root: Path, *, isolated: bool) -> Path:
    """The wheel of the commit that is checked out, in dist/. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        sources, made = Path(folder, "sources"), Path(folder, "wheel")
        _git(root, "worktree", "add", "--quiet", "--detach", str(sources), "HEAD")
        try:
            command = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps"]
            command += [] if isolated else ["--no-build-isolation"]
            subprocess.run([*command, "--wheel-dir", str(made), str(sources)], check=True)
        finally:
            _git(root, "worktree", "remove", "--force", str(sources))
        (root / "dist").mkdir(exist_ok=True)
        (wheel,) = made.glob("*.whl")
        return Path(shutil.copy(wheel, root / "dist"))


def wheel_faults(root: Path, wheel: Path, version: str) -> Iterator[str]:
    """What is wrong with a wheel: files that lack or are too many, its version, a start of its command."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        tracked = set(_git(root, "ls-tree", "-r", "--name-only", "HEAD", "lora_serve").splitlines())
        inside = {name for name in names if name.startswith("lora_serve/")}
        extra = {name for name in names - inside if ".dist-info/" not in name}
        tracked |= compiled_kernels(root)
        yield from (f"lacks {name}" for name in sorted(tracked - inside))
        yield from (f"holds {name}, which is not in the repository" for name in sorted((inside - tracked) | extra))
        info = f"lora_serve-{version}.dist-info"
        if f"{info}/METADATA" not in names:
            yield f"is not of version {version}"
        if f"{info}/licenses/LICENSE" not in names:
            yield "holds no LICENSE"
        with tempfile.TemporaryDirectory() as folder:
            code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from lora_serve.cli import main; sys.exit(main())"
            told = subprocess.run(
                [sys.executable, "-I", "-c", code, str(wheel.resolve()), "--version"],
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
            )
            if told.stdout.strip() != version:
                yield f"its command says {told.stdout.strip() or told.stderr.strip()[-300:]!r}"


def compiled_kernels(root: Path) -> set[str]:
    """The compiled kernels that a wheel of the tree at `root`, which has those of HEAD, brings for this machine."""
    if not (root / "lora_serve" / "model" / "native" / "kernels.c").exists():
        return set()
    code = (
        "from lora_serve.model.native import compiler as c; "
        "print(*(c.SHIPPED / c.file_name(*one) for one in c.variants(c.find().machine)), sep='\\n')"
    )
    told = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    return {str(Path(line).relative_to(root)) for line in told.stdout.splitlines()}


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
