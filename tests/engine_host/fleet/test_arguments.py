"""Settings by name, as a RayService hands them to the application."""

from __future__ import annotations

from typing import Any

import pytest

from lora_serve.core.errors import ConfigError
from lora_serve.engine_host.fleet.app import settings_of

MODEL = {"model": "/on/another/machine"}


def test_they_are_settings_by_name_of_types_that_yaml_and_json_have() -> None:
    found = settings_of(
        MODEL | {"replicas": 2, "cpus_per_replica": 4, "max_upload_size": 4e9, "fuse_layers": False, "speculate": "off",
                 "tenant_weight": ["acme=2"], "adapter_host_memory": "4GiB", "enable_lora": True}
    )  # fmt: skip
    assert found.engine == "ray"
    fleet = found.fleet_slice()
    assert (fleet.min_replicas, fleet.max_replicas, fleet.num_cpus) == (2, 2, 4.0)
    assert (found.max_upload_size, found.fuse_layers, found.speculate) == (4_000_000_000, False, "off")
    assert (found.tenant_weight, found.adapter_host_memory) == ((("acme", 2.0),), 4 * 2**30)


def test_environment_of_the_machine_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_SERVE_MAX_LORAS", "3")
    monkeypatch.setenv("LORA_SERVE_REDIS_URL", "redis://user:word@redis:6379/0")
    found = settings_of(MODEL)
    assert found.max_loras != 3
    assert found.redis_url is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "--model: is required"),
        (MODEL | {"max_lora": 3}, "--max-lora: Extra inputs are not permitted (got 3 in the application's arguments)"),
        (MODEL | {"max_loras": 0, "replicas": 0}, "--max-loras: Input should be greater than or equal to 1"),
        (MODEL | {"engine": "thread"}, "--engine: a fleet's is ray (got 'thread'"),
        (MODEL | {"replicas": "auto"}, "--replicas auto: needs --max-replicas"),
        (MODEL | {"redis_url": "redis://:word@redis"}, "set LORA_SERVE_REDIS_URL in its pods"),
        (MODEL | {"admin_key": "a-long-secret", "api_key": ["b"]}, "admin_key, api_key: Ray shows"),
    ],
)
def test_wrong_arguments_are_refused_in_words_without_secrets(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings_of(given)
    assert words in str(refused.value)
    assert "word@" not in str(refused.value)
    assert "a-long-secret" not in str(refused.value)
