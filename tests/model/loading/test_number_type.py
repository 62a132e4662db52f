"""--dtype auto: the fastest type that is as exact as the checkpoint; and what the log says of it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from lora_serve.core.config import ModelConfig
from lora_serve.core.errors import ConfigError
from lora_serve.core.settings import Settings
from lora_serve.model.base_model import load_model
from lora_serve.model.loading.frozen_model import LoadedModel, load_frozen, read_model_config
from lora_serve.model.loading.number_type import number_type, stored_type
from lora_serve.model.native import compiler, library
from tests.oracle import load_plain, save_tiny_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor's level, and kernels that load."""
    monkeypatch.setattr(compiler, "current", lambda: compiler.LEVELS[request.param])
    monkeypatch.setattr(library, "why_not", lambda device, dtype: None)


def chosen(name: str, own: torch.dtype | None, device: torch.device = CPU) -> torch.dtype:
    return number_type(name, SimpleNamespace(dtype=own), device).dtype


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize(
    ("level", "wanted"),
    [("generic", F32), ("avx2", F32), ("avx512", F32), ("avx512_bf16", BF16), ("amx", BF16)],
    indirect=["level"],
)
def test_auto_is_bfloat16_where_checkpoint_and_processor_are(wanted: torch.dtype) -> None:
    assert chosen("auto", BF16) == wanted
    for own in (F32, F16, torch.float64, None):
        assert chosen("auto", own) == F32


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("level", ["amx"], indirect=True)
def test_auto_is_float32_where_the_kernels_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "why_not", lambda device, dtype: "no C compiler")
    found = number_type("auto", SimpleNamespace(dtype=BF16), CPU)
    assert found.dtype == F32
    assert "no C compiler" in found.reason


def test_on_a_gpu_auto_is_the_checkpoints_own() -> None:
    for own in (F32, BF16, F16):
        assert chosen("auto", own, CUDA) == own


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("level", ["avx2"], indirect=True)
def test_type_that_is_asked_for_is_taken_and_its_slowness_told() -> None:
    bfloat16 = number_type("bfloat16", SimpleNamespace(dtype=BF16), CPU)
    assert bfloat16.dtype == BF16
    assert "float32 would be as fast" in bfloat16.reason
    assert chosen("float16", BF16) == F16
    assert number_type("float32", SimpleNamespace(dtype=BF16), CPU).reason == "as asked"
    assert number_type("float16", SimpleNamespace(dtype=BF16), CUDA).reason == "as asked"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("numbers") / "model")


def model_slice(model: Path, dtype: str) -> ModelConfig:
    return Settings(model=str(model), dtype=dtype).part(ModelConfig)


def loaded(model: Path, dtype: str) -> LoadedModel:
    return load_model(model_slice(model, dtype))


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("level", ["amx"], indirect=True)
@pytest.mark.parametrize(("stored", "told"), [(BF16, None), (BF16, "float32"), (F32, "bfloat16"), (F16, "bfloat16")])
def test_the_files_own_type_counts_whatever_config_json_says(
    stored: torch.dtype, told: str | None, model: Path, tmp_path: Path
) -> None:
    load_plain(model, stored).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = {key: value for key, value in json.loads(file.read_text()).items() if key != "dtype"}
    file.write_text(json.dumps(config if told is None else {**config, "dtype": told}))
    wanted = BF16 if stored == BF16 else F32
    found = number_type(
        "auto", read_model_config(model_slice(tmp_path, "auto")), CPU, stored=stored_type(str(tmp_path))
    )
    assert found.dtype == wanted
    assert load_frozen(model_slice(tmp_path, "auto"), AutoModelForCausalLM).dtype == wanted


def test_type_of_most_numbers_is_that_of_the_files(tmp_path: Path) -> None:
    assert stored_type(str(tmp_path)) is None
    save_file({"norm": torch.ones(9), "ids": torch.ones(99, dtype=torch.int64)}, tmp_path / "1.safetensors")
    assert stored_type(str(tmp_path)) == F32
    save_file({"weight": torch.ones(4, 4, dtype=BF16)}, tmp_path / "2.safetensors")
    assert stored_type(str(tmp_path)) == BF16


def test_log_and_spec_say_which_numbers_and_kernels_serve(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        found = loaded(model, "float32")
    level = compiler.serving(compiler.current(), "float32").name
    assert f"dtype: float32 (as asked); kernels: {level}, compiled here" in caplog.messages
    assert found.spec.kernels is not None
    assert found.spec.kernels == library.description(F32)
    assert (found.spec.kernels.level, found.spec.kernels.order) == (level, "plain")


def test_forced_level_serves_and_a_wrong_one_stops_the_start_in_words(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, order in (("generic", "dot"), (compiler.available()[-1].name, compiler.available()[-1].bfloat16_order)):
        monkeypatch.setenv(compiler.VARIABLE, name)
        library.forget()
        spec = loaded(model, "bfloat16").spec
        assert spec.kernels is not None
        assert (spec.kernels.level, spec.kernels.dtype, spec.kernels.order) == (name, "bfloat16", order)
    monkeypatch.setenv(compiler.VARIABLE, "sse9")
    library.forget()
    with pytest.raises(ConfigError, match="LORA_SERVE_KERNELS=sse9: not one of"):
        loaded(model, "float32")
    monkeypatch.undo()
    library.forget()


def test_without_kernels_the_log_warns_loudly_and_says_what_to_install(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "find", lambda: None)
    library.forget()
    try:
        spec = loaded(model, "float32").spec
    finally:
        library.forget()
    (line,) = [record for record in caplog.records if "kernels" in record.message]
    assert line.levelno == logging.WARNING
    for words in ("kernels: NONE", "no C compiler", "many times slower", "install gcc"):
        assert words in line.message
    assert spec.kernels is not None
    assert (spec.kernels.level, spec.kernels.source) == ("none", "torch")


def test_float16_is_served_by_torch_and_told_to_be_slow(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded(model, "float16")
    (line,) = [record for record in caplog.records if "kernels" in record.message]
    assert line.levelno == logging.WARNING
    assert "kernels: NONE (knows float32 and bfloat16, not float16)" in line.message
    assert line.message.endswith("--dtype float32 has kernels")
