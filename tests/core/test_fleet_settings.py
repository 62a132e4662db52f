"""The settings of a fleet, and what they may not say together."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lora_serve.core.config import FleetConfig
from lora_serve.core.errors import ConfigError
from lora_serve.core.settings import Settings, load_settings


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"LORA_SERVE_{name.upper()}", raising=False)
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def fleet(model: str, *flags: str) -> FleetConfig:
    return load_settings(["--model", model, "--engine", "ray", *flags]).fleet_slice()


def test_defaults_are_one_replica_on_all_cores_in_a_cluster_of_its_own(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)))
    assert fleet(model) == FleetConfig(
        min_replicas=1, max_replicas=1, num_gpus=0.0, num_cpus=7.0, address=None, name="lora-serve", wait=60.0
    )


def test_cores_are_shared_out_among_the_most_replicas_that_there_may_be(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert fleet(model, "--replicas", "3").num_cpus == 2.0
    found = fleet(model, "--replicas", "auto", "--max-replicas", "4")
    assert (found.min_replicas, found.max_replicas, found.num_cpus) == (1, 4, 2.0)
    ranged = fleet(model, "--replicas", "2..4")
    assert (ranged.min_replicas, ranged.max_replicas, ranged.num_cpus) == (2, 4, 2.0)
    assert fleet(model, "--replicas", "100").num_cpus == 1.0
    assert fleet(model, "--replicas", "3", "--cpus-per-replica", "0.5").num_cpus == 0.5


def test_a_replica_has_a_gpu_where_the_device_is_one(model: str) -> None:
    assert fleet(model, "--device", "cuda").num_gpus == 1.0
    assert fleet(model, "--device", "cuda", "--num-gpus", "0.5").num_gpus == 0.5
    assert fleet(model, "--num-gpus", "2").num_gpus == 2.0


@pytest.mark.parametrize("address", ["auto", "10.0.0.5:6379", "head.ray.svc:6379", "[::1]:6379"])
def test_addresses_of_clusters(model: str, address: str) -> None:
    assert fleet(model, "--ray-address", address).address == address


@pytest.mark.many(8)
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--replicas auto", "--replicas auto: needs --max-replicas"),
        ("--max-replicas 2", "--max-replicas 2: bounds --replicas auto, not --replicas 1"),
        ("--replicas 2 --max-replicas 2", "--max-replicas 2: bounds --replicas auto, not --replicas 2"),
        ("--replicas 2..4 --max-replicas 4", "--max-replicas 4: bounds --replicas auto, not --replicas 2..4"),
        *(
            (f"--replicas {value}", "expected a number of engines from 1 to 1000, a range as 2..8, or auto")
            for value in ("0", "1001", "many", "4..2", "0..2", "2..1001", "2..", "..2", "1..2..3", "1.5")
        ),
        ("--cpus-per-replica 0", "--cpus-per-replica: "),
        ("--ray-address ray://h:1", "Ray's client protocol is not spoken here"),
        ("--ray-address h", "expected none, auto or HOST:PORT"),
        ("--ray-address h:0", "expected none, auto or HOST:PORT"),
        ("--ray-address h:65536", "expected none, auto or HOST:PORT"),
        ("--fleet-name a/b", "--fleet-name: "),
    ],
)
def test_what_does_not_fit_is_refused_in_words(model: str, flags: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fleet(model, *flags.split())
    assert words in str(caught.value)


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_flags_of_a_fleet_need_the_engine_ray(model: str, engine: str) -> None:
    with pytest.raises(ConfigError, match=r"^--replicas, --ray-address: only for a fleet: give --engine ray"):
        load_settings(["--model", model, "--engine", engine, "--replicas", "3", "--ray-address", "auto"])
    assert load_settings(["--model", model, "--engine", engine, "--replicas", "1"]).replicas == 1  # says what is so


def test_a_fleet_can_be_set_by_the_environment(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_SERVE_ENGINE", "ray")
    monkeypatch.setenv("LORA_SERVE_REPLICAS", "auto")
    monkeypatch.setenv("LORA_SERVE_MAX_REPLICAS", "5")
    assert load_settings(["--model", model]).fleet_slice().max_replicas == 5


def test_vllms_data_parallelism_names_the_flag_of_ours(model: str) -> None:
    with pytest.raises(ConfigError, match=r"--data-parallel-size 4: .*--engine ray.*use --replicas 4"):
        load_settings(["--model", model, "--data-parallel-size", "4"])
