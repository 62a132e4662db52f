"""The parts that the settings are handed on in."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import lora_serve
from lora_serve.core.config import AdapterConfig, EngineConfig, ServerConfig
from lora_serve.core.settings import SECRETS, Settings

PACKAGE = Path(lora_serve.__file__).parent


def test_no_setting_is_one_that_nobody_reads() -> None:
    nodes = [node for file in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    limited = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "limited_by"]
    read |= {ast.literal_eval(call.args[0]) for call in limited}  # a field's limit goes by the setting's name
    assert set(Settings.model_fields) - {"config"} <= read


def test_times_are_seconds_and_none_where_there_is_no_limit() -> None:
    settings = Settings(
        model="m", batch_wait_ms=5, latency_target_ms=300, prompt_stretch=0, max_wait_ms=2000, max_stop=3, max_loras=7
    )
    engine = settings.part(EngineConfig)
    assert (engine.batch.batch_wait, engine.batch.ttft_target, engine.batch.itl_target) == (0.005, 0.3, None)
    assert (engine.batch.prompt_stretch, engine.max_wait, engine.batch.max_num_seqs) == (0, 2.0, 64)
    assert (settings.part(ServerConfig).max_stop, settings.part(AdapterConfig).max_loras) == (3, 7)


def test_the_part_of_the_server_holds_no_secret() -> None:
    settings = Settings(model="m", admin_key="a long enough key", redis_url="redis://:password@h/0")
    assert not {field.name for field in fields(settings.part(ServerConfig))} & {*SECRETS}
    assert "long enough" not in repr(settings)
