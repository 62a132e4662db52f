"""The parts that the settings are handed on in."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import lora_serve
from lora_serve.core import settings as settings_module
from lora_serve.core.config import AdapterConfig, EngineConfig, ServerConfig
from lora_serve.core.settings import SECRETS, Settings, has_cuda, load_settings

PACKAGE = Path(lora_serve.__file__).parent


def test_no_setting_is_one_that_nobody_reads() -> None:
    missing = set(Settings.model_fields) - {"config"}
    for text in (file.read_text() for file in PACKAGE.rglob("*.py")):
        if not any(name in text for name in missing):
            continue  # there is no need to read it
        nodes = list(ast.walk(ast.parse(text)))
        missing -= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        limited = [
            node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "limited_by"
        ]
        missing -= {ast.literal_eval(call.args[0]) for call in limited}  # a field's limit goes by the setting's name
    assert missing == set()


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


def test_a_gpu_has_defaults_of_its_own_unless_others_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")

    def found(*flags: str) -> tuple[object, ...]:
        s = load_settings(["--model", str(tmp_path), *flags])
        return s.engine, s.max_num_seqs, s.max_num_batched_tokens, s.speculate

    monkeypatch.setattr(settings_module, "has_cuda", lambda: False)
    assert found() == ("thread", 64, 512, "auto")
    assert found("--device", "cuda") == ("process", 256, 2048, "off")
    assert found("--device", "cuda", "--max-num-batched-tokens", "128") == ("process", 128, 128, "off")
    monkeypatch.setattr(settings_module, "has_cuda", lambda: True)
    assert found() == ("process", 256, 2048, "off")
    assert found("--device", "cpu") == ("thread", 64, 512, "auto")
    monkeypatch.setenv("LORA_SERVE_MAX_NUM_SEQS", "32")
    assert found("--engine", "thread", "--speculate", "auto") == ("thread", 32, 2048, "auto")


@pytest.mark.parametrize(
    ("num_gpus", "built_for", "visible", "is_found"),
    [(2, "'13.0'", "0", True), (2, "'13.0'", "-1", False), (2, "None", "0", False), (0, "'13.0'", "0", False)],
)
def test_a_gpu_is_seen_by_its_driver_without_torch(
    num_gpus: int, built_for: str, visible: str, is_found: bool, tmp_path: Path
) -> None:
    """A driver and a torch that say what they are asked, as a machine without a GPU has neither."""
    source = (
        f"int nvmlInit_v2() {{ return 0; }} int nvmlDeviceGetCount_v2(unsigned *n) {{ *n = {num_gpus}; return 0; }}"
    )
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-shared", "-x", "c", "-", "-o", library], input=source, text=True, check=True)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "torch" / "version.py").write_text(
        f"from typing import Optional\n\ncuda: Optional[str] = {built_for}\n"
    )
    here = {
        "LD_LIBRARY_PATH": str(tmp_path),
        "PYTHONPATH": f"{tmp_path}:{PACKAGE.parent}",
        "CUDA_VISIBLE_DEVICES": visible,
    }
    code = "from lora_serve.core.settings import has_cuda; print(has_cuda())"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **here}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(is_found)


def test_a_gpu_is_seen_here_where_torch_sees_one() -> None:
    import torch

    assert has_cuda() == torch.cuda.is_available()
