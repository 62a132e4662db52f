"""The checks before the model loads: what is missing is said in words."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from lora_serve.app.early_checks import check_start
from lora_serve.core.config import ModelConfig
from lora_serve.core.errors import ConfigError, ModelError
from lora_serve.core.settings import Settings
from lora_serve.model.base_model import load_model


def test_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.delitem(sys.modules, "lora_serve.adapters.redis_connection", raising=False)
    settings = Settings(model=str(tmp_path), store=tmp_path / "store", port=0, redis_url="redis://localhost:6379/0")
    with pytest.raises(ConfigError, match=r"--redis-url.*'lora-serve\[redis\]'"):
        check_start(settings)


@pytest.mark.parametrize("is_kept", [False, pytest.param(True, marks=pytest.mark.nightly)])  # a model is loaded
def test_hub_that_cannot_be_reached_is_told_at_once_and_left_alone_for_a_model_that_is_kept(
    is_kept: bool, tmp_path: Path
) -> None:
    """A process of its own: the hub's library reads its variables when it is imported."""
    if is_kept:
        snapshot = tmp_path / "hub" / "models--acme--base" / "snapshots" / "0"
        shutil.copytree(DEMO, snapshot)
        (snapshot.parents[1] / "refs").mkdir()
        (snapshot.parents[1] / "refs" / "main").write_text("0")
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"  # closed before it is asked
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "lora_serve", "check", str(ADAPTER), "--model", "acme/base"],
        env=environment | {"HF_ENDPOINT": nobody, "HF_HUB_CACHE": str(tmp_path / "hub")},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    if is_kept:
        assert done.returncode == 0, done.stderr[-2000:]
    else:
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr[-2000:]
        assert "--model acme/base: there is no such folder, 127.0.0.1 cannot be reached" in done.stderr
        assert time.monotonic() - began < 30  # and not a minute; imports take seconds on a busy machine


DEMO = Path(__file__).parents[2] / "lora_serve/demo_data/model"
ADAPTER = DEMO.parent / "adapters/acme/sql"


def test_more_positions_than_the_model_has_are_refused_in_the_words_of_the_load(tmp_path: Path) -> None:
    known = json.loads((DEMO / "config.json").read_text())["max_position_embeddings"]
    settings = Settings(model=str(DEMO), store=tmp_path / "store", port=0, max_model_len=known + 1)
    with pytest.raises(ModelError) as late:
        load_model(settings.part(ModelConfig))
    with pytest.raises(ModelError) as early:
        check_start(settings)
    assert str(early.value) == str(late.value)
    assert f"--max-model-len {known + 1}: this model knows {known} positions" in str(early.value)
    check_start(replace(settings, max_model_len=known))


@pytest.mark.parametrize(
    ("config", "is_refused"),
    [
        ({"max_position_embeddings": 64}, True),
        ({"text_config": {"max_position_embeddings": 64}, "max_position_embeddings": 512}, True),
        ({"text_config": {"max_position_embeddings": 512}, "max_position_embeddings": 64}, False),
        ({"text_config": {}, "max_position_embeddings": 64}, False),
        ({"text_config": None, "max_position_embeddings": 64}, False),
        ({"n_positions": 64}, False),
        ({"max_position_embeddings": None}, False),
        ({"max_position_embeddings": 0}, False),
        ({"max_position_embeddings": "64"}, False),
        ({"max_position_embeddings": True}, False),
    ],
)
def test_positions_are_only_held_against_a_number_that_the_file_has_for_the_text(
    config: dict[str, object], is_refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = Settings(model=str(tmp_path), store=tmp_path / "store", port=0, max_model_len=100)
    refused = False
    try:
        check_start(settings)
    except ModelError:
        refused = True
    assert refused == is_refused
