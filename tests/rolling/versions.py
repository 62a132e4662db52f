"""Earlier versions of the program, as they were committed, beside the one that is checked out."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class MissingVersionError(Exception):
    """The repository has not the commit of an earlier version."""


@dataclass(frozen=True)
class Version:
    """A commit that stands for a release, as nothing was tagged yet; "": what is checked out.

    `can_return`: its files have the formats of the present version, so that it can run again after that.
    """

    name: str
    commit: str = ""
    can_return: bool = True


# The one place that names them. Once there is a tag, LAST is that tag.
LAST = Version("last", "da64fc0937704cba6b177320d41357abb7706fd6")  # the oldest whose files the present version shares
EARLIER = Version("earlier", "b32b8b5ee1ec77578d0950561f765e4178c9fac1", can_return=False)  # older files: schema 2
HERE = Version("here")


def unpacked(version: Version, folder: Path, root: Path = ROOT) -> Path:
    """The version's `lora_serve` in a new folder below `folder`. Raises MissingVersionError."""
    if not version.commit:
        return root
    words = ["git", "archive", version.commit, "--", "lora_serve"]
    done = subprocess.run(words, cwd=root, capture_output=True, check=False)
    if done.returncode != 0:
        raise MissingVersionError(
            f"this repository has no commit {version.commit}, which stands for an earlier version "
            f"(tests/rolling/versions.py): a shallow clone gets it by `git fetch --unshallow`. "
            f"git: {done.stderr.decode(errors='replace').strip()}"
        )
    place = folder / version.name
    place.mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", str(place)], input=done.stdout, check=True)
    return place


def before(folder: Path) -> Sequence[str]:
    """What stands before the command of a server that runs the code in `folder`."""
    return ["env", "-C", str(folder), "PYTHONSAFEPATH=1", f"PYTHONPATH={folder}"]
