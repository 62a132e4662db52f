"""The slices that the settings are handed on in."""

from __future__ import annotations

import ast
from dataclasses import fields, is_dataclass
from pathlib import Path

import lora_serve
from lora_serve.core import config
from lora_serve.core.settings import Settings

PACKAGE = Path(lora_serve.__file__).parent
SLICES = [kind for kind in vars(config).values() if is_dataclass(kind) and kind.__module__ == config.__name__]


def test_no_slice_has_a_field_that_nobody_reads() -> None:
    read = {
        node.attr
        for file in PACKAGE.rglob("*.py")
        if file != PACKAGE / "core" / "settings.py"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "settings"
    }
    assert {field.name for kind in SLICES for field in fields(kind)} <= read


def test_times_are_seconds_and_none_where_there_is_no_limit() -> None:
    settings = Settings(
        model="m", batch_wait_ms=5, latency_target_ms=300, prompt_stretch=0, max_wait_ms=2000, max_stop=3, max_loras=7
    )
    engine = settings.engine_slice()
    assert (engine.batch.batch_wait, engine.batch.ttft_target, engine.batch.itl_target) == (0.005, 0.3, None)
    assert (engine.batch.prompt_stretch, engine.max_wait, engine.batch.max_num_seqs) == (None, 2.0, 64)
    assert (settings.server_slice().requests.max_stop, settings.adapter_slice().max_loras) == (3, 7)


def test_a_slice_of_the_server_holds_no_secret() -> None:
    settings = Settings(model="m", admin_key="a long enough key", redis_url="redis://:password@h/0")
    assert "long enough" not in repr(settings.server_slice())
    assert "password" not in repr(settings.server_slice())
