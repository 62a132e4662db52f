"""scripts/install takes PyTorch's CPU wheel where there is no NVIDIA driver, and goes on without its index; so does the
CPU image."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Stands in for .venv/bin/python and notes what it is asked for. $fails: no CPU index is reached; $torch: it is there.
PYTHON = """#!/usr/bin/env bash
echo "$*" >> "$calls"
case "$*" in
  *"pip show -q torch"*) [[ -n "$torch" ]] ;;
  *download.pytorch.org*) [[ -z "$fails" ]] ;;
esac
"""


@dataclass(frozen=True)
class Place:
    """A clone in which nothing is really installed."""

    folder: Path

    def install(self, *, driver: bool = False, torch: bool = False, fails: bool = False) -> tuple[list[str], str]:
        """The pip commands that install something, and what was said."""
        calls, proc = self.folder / "calls", self.folder / "driver"
        calls.write_text("")
        if driver:
            proc.write_text("NVRM version")
        ended = subprocess.run(
            [self.folder / "scripts" / "install", "test"],
            env=os.environ
            | {"calls": str(calls), "torch": "1" * torch, "fails": "1" * fails, "LORA_SERVE_NVIDIA_DRIVER": str(proc)},
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        return [line for line in calls.read_text().splitlines() if "pip install" in line], ended.stderr


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("scripts/install", "scripts/cpu_torch", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(PYTHON)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    smi = tmp_path / "nvidia-smi"  # of a driver that is not there
    smi.write_text("#!/bin/sh\nexit 9\n")
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    return Place(tmp_path)


@pytest.fixture(autouse=True)
def no_driver(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{place.folder}:{os.environ['PATH']}")


def test_without_a_driver_torch_comes_from_pytorchs_cpu_index_first(place: Place) -> None:
    (torch, package), said = place.install()
    assert f"--index-url {CPU_INDEX} torch==2.13.0" in torch
    assert "--timeout 8 --retries 0" in torch
    assert "-c constraints.txt -e .[test]" in package
    assert CPU_INDEX not in package
    assert "CPU wheel" in said


def test_index_that_cannot_be_reached_is_told_and_passed_over(place: Place) -> None:
    (_, package), said = place.install(fails=True)
    assert "-e .[test]" in package
    assert "cannot be reached" in said


def test_with_a_driver_pip_decides(place: Place) -> None:
    (package,), said = place.install(driver=True)
    assert CPU_INDEX not in package
    assert "CPU" not in said


def test_torch_that_is_there_stays(place: Place) -> None:
    (package,), _ = place.install(torch=True)
    assert "-e .[test]" in package


@pytest.mark.parametrize("fails", [False, True])
def test_cpu_image_takes_the_cpu_wheel_first_and_says_when_it_cannot(place: Place, fails: bool) -> None:
    """The last stage's RUN lines are run in a folder with what its COPY lines bring there."""
    text = (ROOT / "docker" / "Dockerfile").read_text().replace("\\\n", " ").rpartition("\nFROM ")[2]
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line[:1].isupper()]
    folder = place.folder / "image"
    (folder / "wheel").mkdir(parents=True)
    (folder / "wheel" / "lora_serve-1-py3-none-any.whl").touch()
    for source in [
        name for kind, rest in lines if kind == "COPY" and "--from" not in rest for name in rest.split()[:-1]
    ]:
        shutil.copy(ROOT / source, folder)
    for name in ("python", "pip"):
        shutil.copy(place.folder / ".venv" / "bin" / "python", place.folder / name)
    programs = [rest.replace("/wheel", f"{folder}/wheel") for kind, rest in lines if kind == "RUN"]
    ended = subprocess.run(
        ["bash", "-c", "\n".join(["set -e", *(program for program in programs if "useradd" not in program)])],
        cwd=folder,
        env=os.environ | {"calls": str(folder / "calls"), "torch": "", "fails": "1" * fails, "EXTRAS": "redis"},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    torch, package = (folder / "calls").read_text().splitlines()
    assert f"--index-url {CPU_INDEX} torch==" in torch
    assert "lora_serve-1-py3-none-any.whl[redis]" in package
    assert ("cannot be reached" in ended.stderr) == fails


def test_second_run_installs_nothing(place: Place) -> None:
    place.install()
    assert place.install() == ([], "")
