"""The Serve application of a fleet, and its start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorAlreadyExistsError

from lora_serve.client.wire import to_engine
from lora_serve.core.messages import Configure
from lora_serve.core.settings import Settings
from lora_serve.engine_host.fleet import deploy
from lora_serve.engine_host.fleet.app import application, build


def version_of(**settings: Any) -> str:
    app = application(Settings(model="a/model", engine="ray", **settings))
    return str(app._bound_deployment._version)


def test_servers_with_stores_of_their_own_share_engines_and_with_other_limits_replace_them() -> None:
    one = version_of(store=Path("/one"))
    assert version_of(store=Path("/other"), port=7000, replicas=3) == one
    assert version_of(store=Path("/one"), max_loras=3) != one
    assert version_of(store=Path("/one"), warmup="off") != one


def test_servers_that_start_serve_at_one_moment_find_each_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `tests/e2e/conftest.py` starts its pair on a new cluster."""
    calls = list[Any]()

    def start(**options: Any) -> None:
        calls.append(options)
        if len(calls) == 1:
            raise ActorAlreadyExistsError("SERVE_CONTROLLER_ACTOR already exists")

    monkeypatch.setattr(deploy.serve, "start", start)
    deploy.start_serve()
    assert calls == [calls[0]] * 2


def store_of(app: Any) -> Path:
    (configure,) = to_engine(app._bound_deployment.init_args[0])
    assert isinstance(configure, Configure)
    return configure.adapters.store


def test_engines_use_no_folder_of_a_servers_but_one_that_their_own_application_names() -> None:
    assert store_of(application(Settings(model="a/model", engine="ray", store=Path("/one")))) == Path()
    assert store_of(build({"model": "a/model"})) == Path()
    assert store_of(build({"model": "a/model", "store": "/data/store"})) == Path("/data/store")
