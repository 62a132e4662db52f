"""The Serve application of a fleet, and its start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorAlreadyExistsError

from lora_serve.client.wire import to_engine
from lora_serve.core.errors import ConfigError
from lora_serve.core.messages import Configure
from lora_serve.core.settings import Settings
from lora_serve.engine_host.fleet import app as fleet_app
from lora_serve.engine_host.fleet.app import application, build


def version_of(**settings: Any) -> str:
    app = application(Settings(model="a/model", engine="ray", **settings))
    return str(app._bound_deployment._version)


def test_servers_with_stores_of_their_own_share_engines_and_with_other_limits_replace_them() -> None:
    one = version_of(store=Path("/one"))
    assert version_of(store=Path("/other"), port=7000, replicas=3) == one
    assert version_of(store=Path("/one"), max_loras=3) != one
    assert version_of(store=Path("/one"), warmup="off") != one


@pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning")  # until Ray takes it away
@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ({"replicas": 3}, 3),
        ({"replicas": "2..2"}, 2),
        ({"replicas": "2..5"}, (2, 5)),
        ({"replicas": "auto", "max_replicas": 4}, (1, 4)),
    ],
)
def test_number_of_engines_is_one_or_a_range(settings: dict[str, Any], number: int | tuple[int, int]) -> None:
    config = application(Settings(model="a/model", engine="ray", **settings))._bound_deployment._deployment_config
    scaling = config.autoscaling_config
    assert (config.num_replicas if scaling is None else (scaling.min_replicas, scaling.max_replicas)) == number


def test_idle_engines_count_seldom_for_serve() -> None:
    options = application(Settings(model="a/model", engine="ray"))._bound_deployment.ray_actor_options
    assert options["runtime_env"]["env_vars"]["RAY_SERVE_METRICS_EXPORT_INTERVAL_MS"] == "10000"


def test_servers_that_start_serve_at_one_moment_find_each_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `tests/e2e/conftest.py` starts its pair on a new cluster."""
    calls = list[Any]()

    def start(**options: Any) -> None:
        calls.append(options)
        if len(calls) == 1:
            raise ActorAlreadyExistsError("SERVE_CONTROLLER_ACTOR already exists")

    monkeypatch.setattr(fleet_app.serve, "start", start)
    fleet_app.start_serve()
    assert calls == [calls[0]] * 2


class Controller:
    """Serve's answer about the applications that it has."""

    def __init__(self, deployments: dict[str, Any]) -> None:
        self.details = {"applications": {"lora-serve": {"deployments": deployments, "source": "imperative"}}}

    def get_serve_details(self) -> dict[str, Any]:
        return self.details


def test_application_of_somebody_else_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[Any]()
    monkeypatch.setattr(fleet_app, "start_serve", lambda: None)
    monkeypatch.setattr(fleet_app.serve, "run_many", lambda targets, **options: started.extend(targets))
    settings = Settings(model="a/model", engine="ray")
    monkeypatch.setattr(fleet_app, "_get_global_client", lambda: Controller({"engine": {}, "chat": {}}))
    with pytest.raises(ConfigError, match=r"--fleet-name lora-serve: .* another application"):
        fleet_app.deploy(settings)
    assert not started
    monkeypatch.setattr(fleet_app, "_get_global_client", lambda: Controller({"engine": {}}))
    fleet_app.deploy(settings)
    assert [target.name for target in started] == ["lora-serve"]


def store_of(app: Any) -> Path:
    (configure,) = to_engine(app._bound_deployment.init_args[0])
    assert isinstance(configure, Configure)
    return configure.adapters.store


def test_engines_use_no_folder_of_a_servers_but_one_that_their_own_application_names() -> None:
    assert store_of(application(Settings(model="a/model", engine="ray", store=Path("/one")))) == Path()
    assert store_of(build({"model": "a/model"})) == Path()
    assert store_of(build({"model": "a/model", "store": "/data/store"})) == Path("/data/store")
