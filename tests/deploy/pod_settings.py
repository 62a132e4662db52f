"""The settings that the server reads in a pod."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lora_serve.core.settings import Settings, load_settings
from tests.deploy.rendering import Rendered

SECRETS = {
    "LORA_SERVE_ADMIN_KEY": "a-long-enough-secret",
    "LORA_SERVE_API_KEY": "another-long-secret",
    "LORA_SERVE_OVERFLOW_API_KEY": "a-key-of-the-neighbour",
    "LORA_SERVE_REDIS_URL": "rediss://user:word@redis.example.org:6380/0",
}


def settings_of_pod(rendering: Rendered, environment: pytest.MonkeyPatch, folder: Path) -> Settings:
    """What the server reads in the pod; files of this machine stand for those that are mounted there."""
    for name in ("config.json", "tls.crt", "tls.key"):
        (folder / name).write_text("{}")
    for name, value in rendering.environment().items():
        if name.startswith("LORA_SERVE_"):
            environment.setenv(name, value if isinstance(value, str) else SECRETS[name])
    serve, *arguments = rendering.server()["args"]
    assert serve == "serve"
    return load_settings([re.sub(r"^/(model|tls)\b", str(folder), argument) for argument in arguments])
