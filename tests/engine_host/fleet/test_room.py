"""What a cluster of the server's own can never place is refused before Ray starts."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from ray._private.resource_and_label_spec import ResourceAndLabelSpec

from lora_serve.core.config import FleetConfig
from lora_serve.core.errors import ConfigError
from lora_serve.engine_host.fleet import cluster, node

GIB = 2**30


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores, 3 GiB, which is twelve engines, and two GPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(node, "free_memory", lambda: 3 * GIB)
    monkeypatch.setattr(node, "num_gpus", lambda: 2)


def config(least: int, most: int | None = None, num_gpus: float = 0.0) -> FleetConfig:
    given = {"min_replicas": least, "max_replicas": most or least, "num_gpus": num_gpus, "num_cpus": 1.0}
    return FleetConfig(**given, address=None, name="x", wait=1.0)  # type: ignore[arg-type]


def refused(given: FleetConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        node.check_own_capacity(given)
    return str(caught.value)


def test_engines_that_memory_cannot_hold_are_refused_with_figures() -> None:
    assert refused(config(13, 16)).startswith("--replicas 13: there is no memory here for 13 engines")
    assert refused(config(40)) == (
        "--replicas 40: there is no memory here for 40 engines of 250 MiB each at least, before weights and KV cache; "
        "3.0 GiB are free, enough for 12"
    )


def test_engines_without_a_gpu_are_refused_with_figures() -> None:
    words = "there is no room here for 3 engines of 1 GPUs each; Ray finds 2 GPUs here, enough for 2"
    assert refused(config(3, num_gpus=1.0)) == f"--num-gpus 1: {words}"


@pytest.mark.parametrize(("each", "fit"), [(0.1, 20), (0.5, 4), (0.6, 2), (1.0, 2), (2.0, 1)])
def test_a_part_of_a_gpu_is_one_gpus(each: float, fit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "free_memory", lambda: None)
    node.check_own_capacity(config(fit, num_gpus=each))
    assert f"enough for {fit}" in refused(config(fit + 1, num_gpus=each))


def test_a_cluster_is_not_started_for_what_it_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "own_head", lambda given: pytest.fail("Ray is started"))
    with pytest.raises(ConfigError, match=r"^--num-gpus 4: "), cluster.open_cluster(config(1, num_gpus=4.0)):
        pass


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (config(8), "8 engines take turns on 2 cores: more engines than cores are no faster"),
        (config(1, 13), "there is no memory here for 13 engines, as many as there may be, of 250 MiB each"),
        (config(1, 3, num_gpus=1.0), "there is no room here for 3 engines, as many as there may be, of 1 GPUs each"),
    ],
)
def test_what_can_begin_and_would_be_slow_or_not_grow_is_a_warning(
    given: FleetConfig, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    node.check_own_capacity(given)
    assert words in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


@pytest.mark.parametrize("given", [config(2), config(1, 2), config(2, num_gpus=1.0)])
def test_what_fits_is_not_spoken_of(given: FleetConfig, caplog: pytest.LogCaptureFixture) -> None:
    node.check_own_capacity(given)
    assert caplog.records == []


def test_free_memory_has_swap_and_a_containers_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    file = tmp_path / "meminfo"
    monkeypatch.setattr(node, "_MEMORY", file)
    monkeypatch.setattr(node, "free_in_container", lambda: None)
    assert node.free_memory() is None
    file.write_text("MemTotal: 9 kB\nMemAvailable: 5 kB\nSwapTotal: 4 kB\nSwapFree: 3 kB\nHugePages_Total: 0\n")
    assert node.free_memory() == 8 * 1024
    monkeypatch.setattr(node, "free_in_container", lambda: 1024)
    assert node.free_memory() == 1024


@pytest.mark.parametrize("visible", [None, "", "0", "0,1,2,3,4,5,6,7,8"])
def test_gpus_are_those_that_ray_finds(visible: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    manager, found = ResourceAndLabelSpec._get_current_node_accelerator(None, {})
    assert node.num_gpus() == (found if manager is None or manager.get_resource_name() == "GPU" else 0)
