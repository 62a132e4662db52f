"""A model that no replica could load: said before Ray starts, as one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lora_serve.core.errors import ModelError
from lora_serve.core.settings import Settings
from lora_serve.engine_host.hosts import ray as ray_host
from lora_serve.engine_host.hosts.ray import check_model_files
from lora_serve.text.tokenizer import TextModel

DEMO = Path(__file__).parents[3] / "lora_serve/demo_data/model"


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def with_half_of_the_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def of_another_kind(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(file.read_text().replace('"llama"', '"camel"'))


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (without_weights, "cannot be loaded: there are no weights"),
        (with_half_of_the_weights, "cannot be loaded: model.safetensors: "),
        (of_another_kind, "config.json cannot be used: .*`camel`"),
    ],
)
async def test_broken_model_is_refused_before_ray_starts(
    broken: Callable[[Path], None], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO, model)
    broken(model)
    started: list[Any] = []
    monkeypatch.setattr(ray_host, "open_cluster", started.append)
    settings = Settings(model=str(model), store=tmp_path / "store", engine="ray")
    nothing: Any = None
    with pytest.raises(ModelError, match=f"^--model {model}: {words}") as refused:
        async with ray_host.open_host(settings, nothing, lambda: TextModel.load(str(model))):
            pass
    assert "\n" not in str(refused.value)
    assert started == []


def test_whole_model_is_taken_and_weights_may_be_where_the_replicas_are(tmp_path: Path) -> None:
    check_model_files(str(DEMO), has_weights=True)
    shutil.copytree(DEMO, tmp_path / "model")
    without_weights(tmp_path / "model")
    check_model_files(str(tmp_path / "model"), has_weights=False)
