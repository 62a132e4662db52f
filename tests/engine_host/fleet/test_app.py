"""The Serve application of a fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_serve.core.settings import Settings
from lora_serve.engine_host.fleet.app import application


def version_of(**settings: Any) -> str:
    app = application(Settings(model="a/model", engine="ray", **settings))
    return str(app._bound_deployment._version)


def test_servers_with_stores_of_their_own_share_engines_and_with_other_limits_replace_them() -> None:
    one = version_of(store=Path("/one"))
    assert version_of(store=Path("/other"), port=7000, replicas=3) == one
    assert version_of(store=Path("/one"), max_loras=3) != one
    assert version_of(store=Path("/one"), warmup="off") != one
