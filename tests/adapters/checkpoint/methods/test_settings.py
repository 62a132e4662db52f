"""What each method's config may say: PEFT's own settings pass, whatever else could change the result is refused."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest

from lora_serve.adapters.checkpoint.methods import GAIN_METHODS, METHODS, Method
from lora_serve.adapters.checkpoint.peft_fields import SHARED
from lora_serve.core.errors import InvalidAdapterError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

ALL: dict[str, Method] = {**METHODS, **GAIN_METHODS}
CONFIGS: dict[str, peft.PeftConfig] = {
    "LOHA": peft.LoHaConfig(target_modules=["q_proj"]),
    "LOKR": peft.LoKrConfig(target_modules=["q_proj"]),
    "VERA": peft.VeraConfig(target_modules=["q_proj"]),
    "ADALORA": peft.AdaLoraConfig(target_modules=["q_proj"], total_step=9),
    "IA3": peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
}


def saved(peft_type: str, folder: Path) -> dict[str, Any]:
    CONFIGS[peft_type].save_pretrained(str(folder))
    table = json.loads((folder / "adapter_config.json").read_text())
    assert isinstance(table, dict)
    return table


@pytest.mark.parametrize("peft_type", ALL)
def test_what_peft_saves_by_default_is_parsed(peft_type: str, tmp_path: Path) -> None:
    ALL[peft_type].parse(saved(peft_type, tmp_path))


@pytest.mark.parametrize("peft_type", ALL)
def test_every_known_key_is_one_of_pefts_config_class(peft_type: str) -> None:
    method = ALL[peft_type]
    fields = {field.name for field in dataclasses.fields(CONFIGS[peft_type])}
    assert not (method.HARMLESS | method.UNDERSTOOD) - fields
    assert not method.HARMLESS & method.UNDERSTOOD
    assert not (method.HARMLESS | method.UNDERSTOOD) & SHARED


@pytest.mark.parametrize("peft_type", ALL)
def test_an_unknown_setting_is_refused_unless_it_is_empty(peft_type: str, tmp_path: Path) -> None:
    table = saved(peft_type, tmp_path)
    ALL[peft_type].parse(table | {"use_dora": False, "novelty": None})
    with pytest.raises(InvalidAdapterError, match=r"'novelty' = 1 may change") as caught:
        ALL[peft_type].parse(table | {"use_dora": True, "novelty": 1})
    assert len(caught.value.reasons) == 2


@pytest.mark.parametrize("peft_type", ALL)
def test_another_methods_config_is_refused(peft_type: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapterError, match=f'peft_type is "LORA", not {peft_type}'):
        ALL[peft_type].parse(saved(peft_type, tmp_path) | {"peft_type": "LORA"})


WRONG: dict[str, dict[str, Any]] = {
    "LOHA": {"r": 0, "alpha": "8", "rank_pattern": {"q": 0}, "alpha_pattern": {"q": None}},
    "LOKR": {"r": 2.0, "alpha": float("inf"), "rank_pattern": [1], "alpha_pattern": {"q": True}},
    "VERA": {"r": None, "projection_prng_key": "0", "save_projection": 1},
    "ADALORA": {"init_r": -1, "lora_alpha": None, "rank_pattern": {"q_proj.lora_E": [1]}},
    "IA3": {"feedforward_modules": None},
}


@pytest.mark.parametrize(("peft_type", "key"), [(peft_type, key) for peft_type, bad in WRONG.items() for key in bad])
def test_a_value_of_the_wrong_kind_is_named(peft_type: str, key: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapterError) as caught:
        ALL[peft_type].parse(saved(peft_type, tmp_path) | {key: WRONG[peft_type][key]})
    assert [reason.split()[0].partition("[")[0] for reason in caught.value.reasons] == [key]


def test_a_vera_key_that_torch_could_not_take_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapterError, match="64 bits"):
        ALL["VERA"].parse(saved("VERA", tmp_path) | {"projection_prng_key": 2**63})


def test_checking_an_adapter_loads_no_torch() -> None:
    code = "import sys, lora_serve.adapters.checkpoint.methods; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
