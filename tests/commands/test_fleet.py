"""`lora-serve fleet`: `serve` with engines on Ray, and its subcommands."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from lora_serve.cli import main
from lora_serve.commands import serve
from lora_serve.core.setting_groups.operation import FleetSettings


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines that `serve` got, in place of servers."""
    lines: list[list[str]] = []
    monkeypatch.setattr(serve, "run", lambda arguments: lines.append(arguments) or 0)  # type: ignore[func-returns-value]
    return lines


def test_a_fleet_is_serve_with_the_engine_ray(served: list[list[str]]) -> None:
    assert main(["fleet", "./llama", "--replicas", "2"]) == 0
    assert main(["fleet", "./llama", "--engine=ray"]) == 0
    assert served == [["--engine", "ray", "./llama", "--replicas", "2"], ["--engine", "ray", "./llama", "--engine=ray"]]


def test_settings_may_all_be_elsewhere_than_on_the_command_line(served: list[list[str]]) -> None:
    assert main(["fleet"]) == 0
    assert served == [["--engine", "ray"]]


@pytest.mark.parametrize("flags", [["--engine", "thread"], ["--engine=process"], ["--engine"]])
def test_another_engine_is_no_fleet(
    flags: list[str], served: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fleet", "./llama", *flags]) == 2
    assert "a fleet is --engine ray" in capsys.readouterr().err
    assert served == []


def test_a_word_near_a_subcommand_is_no_model_unless_it_is_there(
    served: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["fleet", "stats"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'stats' is no subcommand and no folder; did you mean `lora-serve fleet status`?" in line
    assert served == []
    (tmp_path / "stats").mkdir()
    for arguments in (["stats"], ["--model", "stopp"], ["gpt2"], ["opt"]):
        assert main(["fleet", *arguments]) == 0
    assert len(served) == 4


def test_help_names_the_fleets_own_flags_and_the_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "--help"]) == 0
    text = capsys.readouterr().out
    for name in (field.name for field in fields(FleetSettings)):
        assert f"--{name.replace('_', '-')} " in text
    assert "fleet stop --ray-address" in text
    assert "fleet status" in text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--ray-address"),
        (["--ray-address", "none"], "--ray-address none: such a fleet ends with its server"),
        (["--ray-address", "h"], "--ray-address: expected none, auto or HOST:PORT"),
        (["--ray-address", "h:1", "--fleet-name", "a/b"], "--fleet-name: "),
        (["--ray-address", "127.0.0.1:1", "--yes"], "--ray-address 127.0.0.1:1: no Ray cluster can be reached there"),
    ],
)
def test_stop_says_what_is_wrong(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "stop", *flags]) == 2
    assert words in capsys.readouterr().err


def test_stop_asks_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "stop", "--ray-address", "127.0.0.1:1"]) == 1
    assert "only --yes deletes the engines of the fleet lora-serve at 127.0.0.1:1" in capsys.readouterr().err
