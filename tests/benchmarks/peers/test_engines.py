"""Command lines, environments and answers of the peers, without any peer at hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers import environment, llama_cpp
from benchmarks.peers.environment import call, make_environment, python_of
from benchmarks.peers.http_engine import measured, token_ids
from benchmarks.peers.lora_serve import LoraServe
from benchmarks.peers.seam import Checkpoints, PeerError
from benchmarks.peers.table import ALL, OURS, families, members
from benchmarks.peers.vllm import Vllm
from benchmarks.side_by_side.__main__ import ours_or
from benchmarks.side_by_side.options import parse_options
from benchmarks.workload import Load
from lora_serve.commands.bench.report import Chunk, LoadResult, RequestRecord

PINS = sorted(environment.REQUIREMENTS.glob("*.txt"))


def record(index: int, num_tokens: int, error: str | None = None) -> RequestRecord:
    chunks = tuple(Chunk(1.0 + number, 1) for number in range(num_tokens))
    return RequestRecord(index, None, 3, 2, 0.5, 0.5, 9.0, chunks, text=" t7 t8", error=error)


def test_answers_without_all_their_tokens_have_failed() -> None:
    found = measured(LoadResult(0.0, 9.0, (record(0, 2), record(1, 1), record(2, 2, "hang_up"))), output_tokens=2)
    assert (found.num_failed, len(found.samples)) == (2, 1)
    (sample,) = found.samples
    assert (sample.index, sample.first_token, sample.gaps, sample.token_ids) == (0, 0.5, (1.0,), (7, 8))


def test_our_server_gets_no_setting_of_the_environment_but_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORA_SERVE_ADMIN_KEY", "a long enough secret")
    monkeypatch.setenv("LORA_SERVE_KERNELS", "generic")
    given: dict[str, str] = {}

    def child(command: list[str], log: Path, environment: dict[str, str]) -> None:
        given.update(environment)
        raise PeerError("seen")

    monkeypatch.setattr("benchmarks.peers.lora_serve.Child", child)
    with pytest.raises(PeerError, match="seen"):
        LoraServe().start(Checkpoints(tmp_path, {}, tmp_path), Load(), 1)
    assert [name for name in given if name.startswith("LORA_SERVE_")] == ["LORA_SERVE_KERNELS"]
    assert given["LORA_SERVE_KERNELS"] == "generic"


@pytest.mark.parametrize("text", [" t7 t8", "t7 t8", "t7t8"])
def test_ids_are_read_from_any_engines_spacing(text: str) -> None:
    assert token_ids(text) == (7, 8)


def test_every_engine_has_a_name_of_its_own_and_ours_is_among_them() -> None:
    names = [peer.name for peer in ALL]
    assert len(set(names)) == len(names)
    assert names[0] == OURS == families()[0]
    assert [peer.name for peer in members("llama_cpp")] == ["llama_cpp-f16", "llama_cpp-f32", "llama_cpp-bf16"]
    assert [peer.name for peer in members("peft-float32")] == ["peft-float32"]
    with pytest.raises(KeyError):
        members("nobody")


def test_a_type_chooses_each_familys_configuration_and_is_told_to_our_server() -> None:
    names = [peer.name for family in families() for peer in members(family, "bfloat16")]
    assert names == [
        OURS, "vllm-bfloat16", "vllm-lora-off-bfloat16", "llama_cpp-bf16", "peft-bfloat16", "transformers-bfloat16"
    ]  # fmt: skip
    (ours,) = members(OURS, "float32")
    assert isinstance(ours, LoraServe)
    assert ours.flags == ("--dtype", "float32")
    assert members("llama_cpp-f16", "float32") == ()


def test_an_engine_without_the_asked_type_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_options(["--dtype", "float32", "--engines", "lora_serve", "vllm"]).dtype == "float32"
    with pytest.raises(SystemExit):
        parse_options(["--dtype", "bfloat16", "--engines", "lora_serve", "llama_cpp-f16"])
    assert "llama_cpp-f16 has no such configuration" in capsys.readouterr().err


def test_a_type_and_further_flags_both_reach_our_server() -> None:
    options = parse_options(["--dtype", "bfloat16", "--server-flags=--policy fair"])
    (ours,) = ours_or(members(OURS, "bfloat16"), options)
    assert isinstance(ours, LoraServe)
    assert ours.flags == ("--dtype", "bfloat16", "--policy", "fair")


def test_a_peer_that_is_not_installed_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "FOLDER", tmp_path)
    monkeypatch.setattr(llama_cpp, "SERVER", tmp_path / "llama-server")
    with pytest.raises(PeerError, match="peers install vllm"):
        python_of("vllm")
    with pytest.raises(PeerError, match="not installed"):
        Vllm("float32").start(Checkpoints(tmp_path, {}, tmp_path), Load(), 1)
    assert command.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(families())
    assert [line.split()[1] for line in lines if line.startswith(("vllm", "llama_cpp"))] == ["missing:"] * 3


def test_what_a_command_says_last_is_the_reason_of_its_failure() -> None:
    with pytest.raises(PeerError, match="no-such-command-here is not on this machine"):
        call(["no-such-command-here"])
    with pytest.raises(PeerError, match="ERROR: no matching distribution"):
        call(["sh", "-c", "echo collecting; echo ERROR: no matching distribution >&2; exit 1"])
    assert call(["echo", "fine"]) == "fine\n"


def test_an_environment_that_was_made_before_is_not_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[str] = []
    folder = tmp_path / "vllm" / "venv" / "bin"

    def note(command: list[str], cwd: Path | None = None) -> str:
        calls.append(command[2])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "python").touch()
        return ""

    monkeypatch.setattr(environment, "FOLDER", tmp_path)
    monkeypatch.setattr(environment, "call", note)
    assert make_environment("vllm") == make_environment("vllm") == folder / "python"
    assert calls == ["venv", "pip"]


@pytest.mark.parametrize("file", PINS, ids=[file.stem for file in PINS])
def test_requirements_of_peers_are_exact_pins_from_no_named_place(file: Path) -> None:
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) > 5
    assert not [line for line in lines if "==" not in line or "://" in line or " " in line]
