"""The demo: what it asks, how it judges, and the command itself against the bundled model."""

from __future__ import annotations

import io
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from rich.console import Console

from lora_serve.commands import demo
from lora_serve.commands.demo import DemoAnswer, DemoFailedError, Question
from lora_serve.commands.server_process import free_port


def answer(text: str, expected: str | None = "SELECT 1") -> DemoAnswer:
    return DemoAnswer(Question("acme/sql", "a prompt", expected), text, "sha256:" + "0" * 64, {"queue": 0.5})


def shown(answers: list[DemoAnswer]) -> list[str]:
    console = Console(file=io.StringIO(), width=demo.WIDE)
    demo.show(console, answers, 6)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip().splitlines()


def test_the_last_lines_are_the_table_of_the_tenants_answers() -> None:
    lines = shown([answer("SELECT 1"), answer("[bold]no"), answer("base", None)])
    assert [cell.strip() for cell in lines[-4].split("|")] == ["tenant", "adapter", "answer", "correct"]
    assert [cell.strip() for cell in lines[-2].split("|")] == ["acme", "acme/sql", "SELECT 1", "yes"]
    assert "[bold]no" in lines[-1]
    assert "NO, expected SELECT 1" in lines[-1]


def test_a_wrong_answer_fails_the_demo() -> None:
    with pytest.raises(DemoFailedError, match="wrong answers of acme/sql"):
        demo._check([answer("SELECT 2"), answer("anything", None)], 6)


def test_a_batch_that_was_not_mixed_fails_the_demo() -> None:
    with pytest.raises(DemoFailedError, match="two adapters"):
        demo._check([answer("SELECT 1")], 1)


def test_server_timing_is_read_in_milliseconds() -> None:
    assert demo.parse_server_timing("queue;dur=0.25, load;dur=3") == {"queue": 0.25, "load": 3.0}


def test_one_question_per_adapter_and_a_folder_for_each() -> None:
    questions, folders = demo.first_questions(), demo.adapter_folders()
    assert {question.model for question in questions} == set(folders)
    assert len({question.tenant for question in questions}) >= 6
    assert all(question.answer for question in questions)


@pytest.mark.nightly
def test_once_prints_only_right_answers_and_exits_with_0() -> None:
    command = [sys.executable, "-m", "lora_serve", "demo", "--once", "--port", str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = done.stdout.rstrip().splitlines()[-len(demo.adapter_folders()) :]
    assert [row.split("|")[-1].strip() for row in rows] == ["yes"] * len(rows)


@pytest.mark.nightly  # by day: the demo with --once
def test_it_stays_up_until_it_is_told_to_end() -> None:
    port = free_port()
    command = [sys.executable, "-u", "-m", "lora_serve", "demo", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        admin_key = next(line.split()[-1] for line in child.stdout if line.startswith("The admin key is in"))
        assert Path(admin_key).exists()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=20) as response:
            assert len(json.load(response)["data"]) > 6
        child.send_signal(signal.SIGTERM)
        assert child.wait(40) == 0
    assert not Path(admin_key).exists()
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", port), timeout=2)


def test_a_taken_port_is_an_error_in_words_unless_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "is_port_free", lambda port: False)
    with pytest.raises(DemoFailedError, match="port 8000 is taken"):
        demo._choose_port(8000, once=False)
    assert demo._choose_port(8000, once=True) not in (0, 8000)


def test_interrupting_the_start_ends_the_server_too() -> None:
    port = free_port()
    command = [sys.executable, "-u", "-m", "lora_serve", "demo", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == f"The console: http://127.0.0.1:{port}/ui/#/live\n"
        assert "Starting" in child.stdout.readline()
        started = time.monotonic()
        child.send_signal(signal.SIGINT)
        assert child.wait(40) == 130
    assert time.monotonic() - started < 40
