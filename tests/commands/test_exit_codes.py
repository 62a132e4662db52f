"""Every exit code, and what is said with it: JSON never, on standard output nothing."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import web

from lora_serve.cli import main
from lora_serve.commands.admin_client import find_admin_key
from tests.commands.conftest import KEY, Adapters
from tests.commands.stub_server import StubServer, refusal


async def test_a_refusal_is_1_and_a_wrong_key_says_where_to_give_one(
    ask: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORA_SERVE_ADMIN_KEY", "another-key")
    for flags in ((), ("--json",)):
        ended = await ask("list", *flags)
        assert (ended.code, ended.out) == (1, "")
        assert "--admin-key" in ended.err
        assert "another-key" not in ended.err


async def test_an_unknown_adapter_is_4(ask: Adapters) -> None:
    for verb in ("show", "pin", "unpin", "prefetch", "evict", "delete"):
        ended = await ask(verb, "acme/missing", "--json", *(["--yes"] if verb == "delete" else []))
        assert (ended.code, ended.out) == (4, ""), verb
        assert "acme/missing" in ended.err


async def test_unavailable_is_5_and_says_when_to_come_back(ask_stub: Adapters, stub: StubServer) -> None:
    stub.replies.append(refusal(503, "The registry cannot be reached.", Retry_After="7"))
    ended = await ask_stub("show", "acme/support")
    assert ended.code == 5
    assert ended.err == (
        f"lora-serve: error: {stub.url}: The registry cannot be reached.\ntry again in 7 s (Retry-After)\n"
    )


async def test_who_is_told_when_to_come_back_waits_and_asks_again(
    ask_stub: Adapters, stub: StubServer, make_adapter: Callable[..., Path]
) -> None:
    """429 with Retry-After, as beyond --admin-acts-per-minute; uploads send their files anew."""
    stub.replies += [refusal(429, "Too many acts.", Retry_After="0") for _ in range(2)]
    ended = await ask_stub("show", "acme/support")
    assert (ended.code, ended.err) == (0, f"{stub.url}: Too many acts. Waiting for 0 s.\n" * 2)
    stub.replies.append(refusal(429, "Too many acts.", Retry_After="0"))
    ended = await ask_stub("upload", "acme/new", str(make_adapter()))
    assert (ended.code, stub.replies) == (0, []), ended.err
    assert stub.upload_bytes > 1000


async def test_waiting_longer_than_the_timeout_or_with_a_wrong_key_is_no_use(
    ask_stub: Adapters, stub: StubServer
) -> None:
    stub.replies.append(refusal(429, "Too many acts.", Retry_After="9"))
    ended = await ask_stub("show", "acme/support", "--timeout", "5")
    assert (ended.code, ended.err.count("try again in 9 s")) == (1, 1)
    stub.replies.append(refusal(429, "The API key is not valid.", "invalid_api_key", Retry_After="0"))
    assert (await ask_stub("show", "acme/support")).code == 1
    assert stub.gets == 0


async def test_nobody_there_is_3(adapters: Adapters) -> None:
    ended = await adapters("list", "--url", "http://127.0.0.1:1")
    assert (ended.code, ended.out) == (3, "")
    first, second, *rest = ended.err.splitlines()
    assert first.startswith("lora-serve: error: cannot connect to http://127.0.0.1:1: is the server running? (")
    assert ("--url" in second, rest) == (True, [])


@pytest.mark.parametrize(
    "reply",
    [
        web.Response(text="<html>hello</html>", content_type="text/html"),
        web.json_response([1, 2]),
        web.json_response({"status": "ok"}),
        web.Response(status=302, headers={"Location": "/elsewhere"}),
    ],
    ids=["html", "list", "another", "redirect"],
)
async def test_something_else_there_is_3(ask_stub: Adapters, stub: StubServer, reply: web.Response) -> None:
    stub.replies.append(reply)
    ended = await ask_stub("show", "acme/support")
    assert ended.code == 3
    assert "is not lora-serve's admin API" in ended.err


async def test_an_error_without_json_still_names_its_status(ask_stub: Adapters, stub: StubServer) -> None:
    stub.replies += [web.Response(status=502, text="Bad gateway"), web.json_response({"error": "x"}, status=500)]
    said = f"lora-serve: error: {stub.url}: the server answered"
    assert (await ask_stub("show", "acme/support")).err == f"{said} 502\n"
    ended = await ask_stub("show", "acme/support")
    assert (ended.code, ended.err) == (1, f"{said} 500\n")


async def test_no_answer_in_time_is_3(ask_stub: Adapters, stub: StubServer, make_adapter: Any) -> None:
    """Counted from the last byte sent: an upload may take longer than --timeout."""
    stub.may_upload_go_on.clear()
    folder = make_adapter("a")
    ended = await ask_stub("upload", "acme/a", str(folder), "--timeout", "0.2")
    assert ended.code == 3
    assert "no answer within 0.2 s (--timeout)" in ended.err


async def test_an_upload_that_nobody_reads_is_3_but_a_slow_one_is_not(
    ask_stub: Adapters, stub: StubServer, make_adapter: Any
) -> None:
    """The kernel holds about 4 MB that it has taken and the server has not: half a second's worth here."""
    folder = make_adapter("a")
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.truncate(30_000_000)
    stub.upload_seconds_per_byte = 1 / 8_000_000
    began = time.monotonic()
    assert (await ask_stub("upload", "acme/a", str(folder), "--timeout", "3")).code == 0
    assert time.monotonic() - began > 3, "it took no longer than --timeout altogether"
    stub.may_upload_go_on.clear()
    ended = await ask_stub("upload", "acme/a", str(folder), "--timeout", "0.5")
    assert ended.code == 3
    assert "no answer within 0.5 s (--timeout)" in ended.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frobnicate"], ["SUBCOMMAND", "frobnicate", "rollback"]),
        (["show"], ["required", "ID"]),
        (["show", "../engine"], ["ID", "../engine", "legal"]),
        (["show", "a", "b"], ["b"]),
        (["list", "--limt", "3"], ["--limt", "did you mean --limit?"]),
        (["list", "--limit", "0"], ["--limit", "'0'", "1"]),
        (["list", "--limit", "1", "--all"], ["--all", "not allowed"]),
        (["list", "--state", "lost"], ["--state", "lost", "on_device"]),
        (["list", "--url", "localhost:8000"], ["--url", "localhost:8000", "http://"]),
        (["list", "--url", "http://user:pw@host"], ["--url", "user"]),
        (["list", "--timeout", "0"], ["--timeout", "'0'"]),
        (["list", "--timeout", "nan"], ["--timeout", "nan"]),
        (["register", "a", "b", "--metadata", "[1]"], ["--metadata", "JSON object"]),
        (["register", "a", "b", "--metadata", "{"], ["--metadata", "JSON object"]),
        (["upload", "a", "no/such/path"], ["PATH", "no/such/path"]),
        (["route", "a", "x"], ["VERSION", "'x'"]),
        (["route", "a", "1", "--canary", "4"], ["--canary", "VERSION=PERCENT", "'4'"]),
        (["canary", "a", "4", "101"], ["PERCENT", "101"]),
        (["list", "--admin-key", "clé"], ["--admin-key", "ASCII"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_line_is_2_in_one_line(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["adapters", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert all(word in captured.err for word in words), captured.err
    assert "clé" not in captured.err


@pytest.mark.parametrize(
    "error",
    [MemoryError(), ImportError("libx.so: failed to map segment from shared object"), OSError(errno.ENOMEM, "x")],
)
def test_too_little_memory_is_2_in_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lora_serve.commands.serve.run", Mock(side_effect=error))
    assert main(["serve"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "ulimit -v" in line
    monkeypatch.setattr("lora_serve.commands.serve.run", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        main(["serve"])


@pytest.mark.many(1)
@pytest.mark.parametrize("engine", ["thread", "process"])
def test_a_start_in_too_little_address_space_says_so(engine: str, tmp_path: Path) -> None:
    most = 400 * 2**20
    ended = subprocess.run(
        [sys.executable, "-m", "lora_serve", "serve", "lora_serve/demo_data/model", "--engine", engine, "--port", "0",
         "--store", str(tmp_path)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (most, most)),
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("lora-serve: error: ")
    assert "ulimit -v" in line


def test_a_wrong_url_in_the_environment_is_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LORA_SERVE_URL", "http://127.0.0.1:8000, there")
    assert main(["adapters", "list"]) == 2
    assert "LORA_SERVE_URL" in capsys.readouterr().err


def test_a_folder_without_weights_is_2_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert main(["adapters", "upload", "a", str(tmp_path)]) == 2
    assert "adapter_model.safetensors" in capsys.readouterr().err
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    assert main(["adapters", "upload", "a", str(tmp_path)]) == 2
    assert "adapter_model.bin is a pickle" in capsys.readouterr().err


def test_help_has_examples_and_exit_codes_and_no_subcommand_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    from lora_serve.commands.adapters import VERBS

    assert main(["adapters"]) == 2
    usage = capsys.readouterr().err
    assert all(f"    {verb.name} " in usage for verb in VERBS)
    for verb in VERBS:
        with pytest.raises(SystemExit) as ended:
            main(["adapters", verb.name, "--help"])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert f"lora-serve adapters {verb.name}" in text.partition("examples:")[2]
        assert "130  interrupted" in text


async def test_flags_may_stand_before_the_subcommand(adapters: Adapters, stub: StubServer) -> None:
    ended = await adapters("--url", stub.url, "--json", "show", "acme/support")
    assert ended.document["id"] == "acme/support"


async def test_the_url_may_have_a_prefix_and_a_slash(adapters: Adapters, stub: StubServer) -> None:
    assert (await adapters("show", "acme/support", "--url", stub.url + "/")).code == 0
    assert (await adapters("show", "acme/support", "--url", stub.url + "/behind/a/proxy")).code == 4


async def test_the_key_is_read_from_the_store_of_this_machine(
    ask: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "admin_key").write_text(KEY + "\n")
    monkeypatch.delenv("LORA_SERVE_ADMIN_KEY")
    assert (await ask("list")).code == 1
    assert (await ask("list", "--store", str(tmp_path / "keys"))).code == 0
    monkeypatch.setenv("LORA_SERVE_STORE", str(tmp_path / "keys"))
    assert (await ask("list")).code == 0


def test_the_default_stores_key_is_not_sent_to_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapters_store").mkdir()
    (tmp_path / "adapters_store" / "admin_key").write_text("secret-of-the-store\n")
    monkeypatch.chdir(tmp_path)
    assert find_admin_key(None, None, "http://127.0.0.1:8000") == "secret-of-the-store"
    assert find_admin_key(None, None, "http://localhost:8000") == "secret-of-the-store"
    assert find_admin_key(None, None, "https://lora.example.com") is None
    with monkeypatch.context() as serving:
        serving.setenv("LORA_SERVE_STORE", "adapters_store")  # of the server here
        assert find_admin_key(None, None, "https://lora.example.com") is None
        assert find_admin_key(None, None, "http://127.0.0.1:8000") == "secret-of-the-store"
    assert find_admin_key(None, "adapters_store", "https://lora.example.com") == "secret-of-the-store"
    assert find_admin_key("given-key", None, "http://127.0.0.1:8000") == "given-key"


async def test_ctrl_c_during_an_upload_is_130_without_a_traceback(stub: StubServer, make_adapter: Any) -> None:
    folder = make_adapter("a")
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.truncate(30_000_000)
    stub.may_upload_go_on.clear()
    arguments = ("-m", "lora_serve", "adapters", "upload", "acme/a", str(folder), "--url", stub.url)
    child = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ}
    )
    await stub.has_upload_begun.wait()
    child.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(child.communicate(), 20)
    assert (child.returncode, out, err) == (130, b"", b"interrupted\n")


def test_the_command_imports_nothing_heavy() -> None:
    program = (
        "import sys; from lora_serve.cli import main; "
        "code = main(['adapters', 'list', '--url', 'http://127.0.0.1:1']); "
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'redis', 'prometheus_client'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy or code != 3 else 0)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
