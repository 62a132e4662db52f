"""Points 12, 14 and 20: all that a real server says and writes, while it holds secrets and is given trouble.

Every secret, prompt and folder has a word in it that is found nowhere else; then everything is searched for the words.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
import requests

from tests.e2e.conftest import Site
from tests.redis_server import RedisServer

KEY = "zebra-admin-key-of-this-test"
REDIS_PASSWORD = "zebra-redis-password"
TOKEN = "ls-AbCdEfGhIjKl-zebraZEBRAzebraZEBRAzebraZEBRAzebraZEBRA123"
PROMPT = "zebra crossing at noon"
WORD = "zebra"  # in every secret and prompt
ADMIN = {"Authorization": f"Bearer {KEY}"}


@dataclass
class Story:
    """A server's life, and everything it said."""

    root: Path  # where all that is ours lies; no path below it may be shown
    store: Path
    log: Path
    redis: str  # with its password
    core_limit: int = -1
    said: list[str] = field(default_factory=list)

    def ask(self, method: str, url: str, **more: Any) -> requests.Response:
        answer = requests.request(method, url, timeout=300, **more)
        text = answer.text
        for sent in ("source", "lora_path"):  # an admin who is told its own path again is told nothing
            text = text.replace(str(more.get("json", {}).get(sent, "\0")), "<sent>")
        if "/v1/models" in url and answer.ok:  # `root` repeats what the operator gave, to the operator alone
            text = re.sub(r'"root": "[^"]*"', '"root": ""', text)
        self.said.append(f"{method} {urlsplit(url).path}: {answer.status_code} {dict(answer.headers)} {text}")
        return answer


def spoil(folder: Path, adapters: Path) -> None:
    """Adapters that fail, each in a way of its own, in folders with a name that must not be told."""
    good = next(iter(adapters.glob("*/*/adapter_config.json"))).parent
    for name in ("truncated", "json", "empty", "linked", "shape", "config-nan", "unreadable"):
        shutil.copytree(good, folder / name)
    weights = (folder / "truncated" / "adapter_model.safetensors").read_bytes()
    (folder / "truncated" / "adapter_model.safetensors").write_bytes(weights[: len(weights) // 2])
    (folder / "json" / "adapter_config.json").write_text("{not json")
    (folder / "empty" / "adapter_model.safetensors").write_bytes(b"")
    (folder / "linked" / "adapter_model.safetensors").unlink()
    (folder / "linked" / "adapter_model.safetensors").symlink_to("/etc/hostname")
    config = json.loads((folder / "shape" / "adapter_config.json").read_text())
    (folder / "shape" / "adapter_config.json").write_text(json.dumps({**config, "r": 3}))
    (folder / "config-nan" / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": float("nan")}))
    (folder / "unreadable" / "adapter_config.json").unlink()
    (folder / "unreadable" / "adapter_config.json").mkdir()


def misuse(story: Story, url: str, bad: Path, good: Path) -> None:
    """Right, wrong and hostile requests on every surface."""
    say = story.ask
    assert say("POST", f"{url}/admin/adapters", json={"id": "acme/a", "source": str(good)}, headers=ADMIN).ok
    for folder in [*sorted(bad.iterdir()), bad / "missing", story.root.parent, Path("/etc/passwd")]:
        body = {"id": f"acme/{folder.name}", "source": str(folder), "pin": True}
        answer = say("POST", f"{url}/admin/adapters", json=body, headers=ADMIN)
        assert 400 <= answer.status_code < 500, answer.text
        say("POST", f"{url}/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": str(folder)}, headers=ADMIN)
    say("PUT", f"{url}/admin/adapters/acme/up", data=b"\x1f\x8bnot a tar", headers=ADMIN)
    say("PUT", f"{url}/admin/adapters/acme/up", files={"adapter_config.json": b"{}"}, headers=ADMIN)
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/embeddings"):
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "prompt": PROMPT, "input": PROMPT}
        for more in ({}, {"model": "acme/a"}, {"model": "nobody/x"}, {"stream": True}, {"max_tokens": -1}):
            headers = {"Authorization": f"Bearer {TOKEN}", "traceparent": "zz"}
            for body in ({**chat, **more}, {**chat, **more, "temperature": "hot"}):
                say("POST", f"{url}{path}", json={"max_tokens": 2, **body}, headers=headers)
        say("POST", f"{url}{path}?api_key={TOKEN}", data=f'{{"prompt": "{PROMPT}'.encode(), headers={"X-Zebra": TOKEN})
    for path in (
        "/admin/adapters",
        "/admin/engine",
        "/admin/fleet?adapter=acme/a",
        "/metrics",
        "/v1/models",
        "/v1/models/acme/a",
        "/tokenizer_info",
    ):
        for headers in (ADMIN, {"Authorization": f"Bearer {TOKEN}"}, {}):
            say("GET", f"{url}{path}", headers=headers)
    for path in (
        "/ready",
        "/health",
        "/version",
        "/docs",
        "/openapi.json",
        "/../etc/passwd",
        "/admin/adapters/..%2f..",
    ):
        say("GET", f"{url}{path}")


@pytest.fixture(scope="module")
def story(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    root = tmp_path_factory.mktemp("zone-of-paths")
    bad, store = root / "bad", root / "store"
    spoil(bad, site.root / "adapters")
    far = RedisServer(tmp_path_factory.mktemp("redis"))
    far.start()
    old = os.umask(0)  # the least careful of all shells
    cores = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (cores[1], cores[1]))
    try:
        with far.client() as client:
            client.execute_command("ACL", "SETUSER", "server", "reset", "on", f">{REDIS_PASSWORD}", "~*", "&*", "+@all")
        url = f"redis://server:{REDIS_PASSWORD}@127.0.0.1:{far.port}/0"
        model = root / "model"
        shutil.copytree(site.model, model)
        good = root / "good"
        shutil.copytree(next(iter(site.adapters.values())), good)
        arguments = [
            "--model", str(model), "--served-model-name", "tiny", "--admin-key", KEY, "--store", str(store),
            "--adapter-root", str(root), "--max-model-len", "96", "--kv-cache-memory", "4MiB", "--log-format", "json",
            "--redis-url", url,
        ]  # fmt: skip
        story = Story(root, store, root / "log", url)
        with site.host.serving(arguments, story.log) as server:
            limits = Path(f"/proc/{server.pid}/limits").read_text()
            story.core_limit = int(limits.partition("Max core file size")[2].split()[0].replace("unlimited", "-1"))
            misuse(story, server.url, bad, good)
            far.pause()  # it is away for a while: what is said then?
            story.ask("GET", f"{server.url}/v1/models")
            story.ask("POST", f"{server.url}/admin/adapters", json={"id": "b", "source": str(good)}, headers=ADMIN)
            far.resume()
        yield story
    finally:
        os.umask(old)
        resource.setrlimit(resource.RLIMIT_CORE, cores)
        far.stop()


def texts_of(story: Story) -> Iterator[tuple[str, str]]:
    """(where, what) of all that was said."""
    yield from (("log", line) for line in story.log.read_text().splitlines())
    yield from (("answer", text) for text in story.said)


def test_the_story_is_worth_searching(story: Story) -> None:
    lines = [json.loads(line) for line in story.log.read_text().splitlines()]
    statuses = {line["status"] for line in lines if line["logger"] == "lora_serve.access"}
    assert statuses >= {200, 201, 400, 401, 404, 422}
    assert not statuses & {500, 502}
    assert {"tenant", "adapter", "digest", "request_id"} <= set(next(line for line in lines if "status" in line))
    assert any(line["level"] == "warning" for line in lines)
    assert len(story.said) > 80


def test_nothing_that_the_server_says_holds_a_secret_a_prompt_or_a_path(story: Story) -> None:
    texts = list(texts_of(story))
    secrets = [(where, text) for where, text in texts if WORD in text.lower()]
    assert secrets == []
    folders = {str(story.root), str(story.root.parent), str(Path(__file__).parents[2]), sys.prefix, str(Path.home())}
    # A word around each path is enough to see where it comes from. The log is the operator's own, and may name them.
    shown = {
        text[max(0, at - 60) : at + 80] for text in story.said for folder in folders if (at := text.find(folder)) >= 0
    }
    assert shown == set()
    assert [item for item in texts if "Traceback" in item[1] or 'File "' in item[1]] == []


def test_all_that_the_server_writes_is_its_owners_only(story: Story) -> None:
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in [story.store, *story.store.rglob("*")]}
    assert len(modes) > 5
    wrong = {str(path): oct(mode) for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)}
    assert wrong == {}


def test_nothing_in_the_store_holds_a_key(story: Story) -> None:
    for path in story.store.rglob("*"):
        if path.is_file():
            assert WORD.encode() not in path.read_bytes().lower(), path
    for database in story.store.rglob("*.sqlite3"):
        with sqlite3.connect(database) as db:
            assert WORD not in "".join(db.iterdump()).lower()


def test_export_of_the_registry_holds_no_key(story: Story, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lora_serve", "registry", "export", "--redis-url", story.redis]
    done = subprocess.run(
        [*command, "--to", str(tmp_path / "out")], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert WORD not in (done.stdout + done.stderr).lower()
    copied = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "adapter_model.safetensors" for path in copied)
    assert [path for path in copied if path.name == "admin_key" or WORD.encode() in path.read_bytes().lower()] == []


def test_nothing_in_redis_holds_a_key_or_a_prompt(story: Story) -> None:
    with redis.Redis.from_url(story.redis) as client:
        for key in client.scan_iter():
            assert WORD.encode() not in key.lower() + client.dump(key).lower()


def test_process_leaves_no_core_file(story: Story) -> None:
    """A core file would hold every key and prompt in memory."""
    assert resource.getrlimit(resource.RLIMIT_CORE)[1] != 0, "otherwise this says nothing of the server"
    assert story.core_limit == 0
