"""The bundled Redis, as a real redis-server started with the chart's arguments, by the address that the server gets."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from lora_serve.commands.server_process import free_port
from tests.deploy.rendering import Rendered

PASSWORD = "0123456789abcdef"


@pytest.fixture
def container(renderings: dict[str, Rendered]) -> dict[str, Any]:
    (found,) = renderings["trial"].of("StatefulSet", "-redis")["spec"]["template"]["spec"]["containers"]
    return dict(found)


@pytest.fixture
def port(container: dict[str, Any], tmp_path: Path) -> Iterator[int]:
    """Of the running server, its folder in place of the volume."""
    port = free_port()
    filled = {"$(REDISCLI_AUTH)": PASSWORD, "/data": str(tmp_path)}
    arguments = [filled.get(word, word) for word in container["command"] + container["args"]]
    with subprocess.Popen(
        [*arguments, "--port", str(port), "--bind", "127.0.0.1"], stdout=subprocess.DEVNULL
    ) as process:
        yield port
        process.kill()


def probe(container: dict[str, Any], kind: str, port: int, password: str) -> int:
    """Exit code of a probe."""
    command = [word.replace("redis-cli", f"redis-cli -p {port}") for word in container[kind]["exec"]["command"]]
    variables = {**os.environ, container["env"][0]["name"]: password}
    return subprocess.run(command, env=variables, stderr=subprocess.DEVNULL, check=False, timeout=20).returncode


def test_it_keeps_everything_and_opens_for_the_password_alone(
    renderings: dict[str, Rendered], container: dict[str, Any], port: int
) -> None:
    deadline = time.monotonic() + 20
    while probe(container, "startupProbe", port, PASSWORD):
        assert time.monotonic() < deadline, "redis-server did not come up"
        time.sleep(0.05)
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert probe(container, kind, port, PASSWORD) == 0
        assert probe(container, kind, port, "wrong") != 0
    given = renderings["trial"].environment()["LORA_SERVE_REDIS_URL"]
    url = given.replace("$(REDIS_PASSWORD)", PASSWORD).replace("lora-serve-redis:6379", f"127.0.0.1:{port}")
    with redis.Redis.from_url(url) as client:
        assert client.config_get("appendonly") == {"appendonly": "yes"}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    services = renderings["trial"].of("Service", "-redis")
    assert given.endswith(f"@{services['metadata']['name']}:{services['spec']['ports'][0]['port']}/0")
