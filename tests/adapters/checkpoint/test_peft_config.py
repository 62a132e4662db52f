from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft import AdaLoraConfig, IA3Config, LoHaConfig, LoKrConfig, LoraConfig, VeraConfig
from peft import PeftConfig as PeftConfigOfPeft

from lora_serve.adapters.checkpoint.peft_config import PeftConfig, parse_config
from lora_serve.adapters.checkpoint.peft_fields import KINDS
from lora_serve.core.errors import InvalidAdapterError

PLAIN = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}


def parse(**changes: Any) -> PeftConfig:
    return parse_config(json.dumps(PLAIN | changes).encode())


def reasons_of(text: bytes, max_rank: int | None = None) -> tuple[str, ...]:
    with pytest.raises(InvalidAdapterError) as caught:
        parse_config(text, max_rank)
    return caught.value.reasons


def test_smallest_config_is_understood() -> None:
    config = parse(base_model_name_or_path="org/base")
    assert (config.ranks.r, config.ranks.alpha, config.target_modules) == (8, 16.0, ("q_proj", "v_proj"))
    assert config.base_model == "org/base"
    assert config.ranks.scale(8, 16.0) == 2.0


def test_rank_stabilised_scale_divides_by_the_root_of_the_rank() -> None:
    assert parse(use_rslora=True).ranks.scale(16, 8.0) == 2.0


@pytest.mark.parametrize("value", [None, False, {}, [], "", 0])
def test_unknown_settings_that_say_nothing_are_listed(value: Any) -> None:
    assert parse(some_new_feature=value).ignored == ("some_new_feature",)


@pytest.mark.parametrize("value", [True, 1, "x", [0], {"a": None}])
def test_unknown_settings_that_say_something_are_refused(value: Any) -> None:
    with pytest.raises(InvalidAdapterError, match="some_new_feature"):
        parse(some_new_feature=value)


@pytest.mark.parametrize(
    "setting",
    [
        {"lora_dropout": 0.1},
        {"fan_in_fan_out": True},
        {"inference_mode": False},
        {"auto_mapping": {"base_model_class": "X", "parent_library": "os"}},
        {"megatron_core": "megatron.core"},
        {"qalora_group_size": 16},
        {"eva_config": {"rho": 2.0}},
        {"init_lora_weights": False},
        {"init_lora_weights": "eva"},
        {"revision": "main"},
        {"layers_to_transform": []},
    ],
)
def test_settings_of_training_only_change_nothing(setting: dict[str, Any]) -> None:
    assert parse(**setting) == parse()


EVERY_TYPE: tuple[Any, ...] = (True, False, 0, 1, 1.5, "", "yes", [], ["x"], {}, {"a": 1})
LISTED = {  # every setting of PEFT's own configs, and what may be taken of EVERY_TYPE for each
    **dict.fromkeys(
        ["fan_in_fan_out", "inference_mode", "use_rslora", "ensure_weight_tying", "lora_bias", "use_dora"],
        (True, False),
    ),
    "use_qalora": (False,),
    "use_bdlora": (False, {}),
    **dict.fromkeys(["corda_config", "eva_config", "loftq_config", "lora_ga_config"], ({}, {"a": 1})),
    **dict.fromkeys(["monteclora_config", "velora_config", "auto_mapping"], ({}, {"a": 1})),
    **dict.fromkeys(["runtime_config", "rank_pattern", "alpha_pattern"], ({}, {"a": 1})),
    **dict.fromkeys(["megatron_config", "arrow_config", "kasa_config"], ({},)),
    **dict.fromkeys(["base_model_name_or_path", "revision", "peft_version", "megatron_core"], ("", "yes")),
    "lora_dropout": (0, 1, 1.5),
    "qalora_group_size": (0, 1),
    "layer_replication": ([],),
    "bias": (),
    "task_type": (),
    "r": (1,),
    "lora_alpha": (0, 1, 1.5),
    "init_lora_weights": (True, False),
    "target_modules": ("yes", ["x"]),
    "exclude_modules": ("", "yes", [], ["x"]),
    "modules_to_save": ([], ["x"]),
    "target_parameters": ([], ["x"]),
    "layers_to_transform": (0, 1, []),
    "layers_pattern": ("", []),
    "trainable_token_indices": ([], {}),
    "alora_invocation_tokens": ([],),
}


@pytest.mark.parametrize("key", LISTED)
def test_settings_of_another_type_than_theirs_are_refused(key: str) -> None:
    taken = []
    for value in EVERY_TYPE:
        with suppress(InvalidAdapterError):
            parse(**{key: value})
            taken.append(value)
    assert list(map(repr, taken)) == list(map(repr, LISTED[key]))
    if key not in ("r", "lora_alpha", "target_modules"):
        assert parse(**{key: None}) == parse()  # null is what PEFT writes for what was not set


@pytest.mark.parametrize("config", [LoraConfig, AdaLoraConfig, LoHaConfig, LoKrConfig, IA3Config, VeraConfig])
def test_the_types_are_pefts_own(config: type[PeftConfigOfPeft]) -> None:
    """Whatever PEFT gives to a setting by itself has a type that is taken."""
    for field in dataclasses.fields(config):
        kinds = KINDS.get(field.name)
        if kinds is not None and field.default not in (None, dataclasses.MISSING):
            assert type(field.default) in kinds, field.name


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"fan_in_fan_out": "yes"}, "fan_in_fan_out must be true or false"),
        ({"peft_type": "HRA"}, "not one of LORA, ADALORA, IA3, LOHA, LOKR, VERA"),
        ({"task_type": "SEQ_CLS"}, "SEQ_CLS"),
        ({"bias": "some"}, "none, all, lora_only"),
        ({"use_dora": 1}, "use_dora"),
        ({"use_dora": True, "lora_bias": True}, "cannot go with lora_bias"),
        *(
            ({key: True, "target_parameters": ["x.weight"]}, "cannot go with target_param")
            for key in ("use_dora", "lora_bias")
        ),
        ({"modules_to_save": "lm_head"}, "modules_to_save"),
        ({"trainable_token_indices": {"embed_tokens": ["a"]}}, "trainable_token_indices"),
        ({"trainable_token_indices": {"embed_tokens": [-1]}}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer replication"),
        ({"target_parameters": "experts.weight"}, "target_parameters"),
        ({"alora_invocation_tokens": "help"}, "alora_invocation_tokens"),
        ({"lora_bias": "yes"}, "lora_bias"),
        ({"use_qalora": True}, "QA-LoRA"),
        ({"use_bdlora": {"nblocks": 2}}, "block-diagonal"),
        ({"megatron_config": {"a": 1}}, "Megatron"),
        ({"ensure_weight_tying": 1}, "ensure_weight_tying"),
        ({"init_lora_weights": "pissa_niter_4"}, "base model's weights by a random decomposition"),
        ({"init_lora_weights": "PiSSA"}, "base model's weights"),
        ({"init_lora_weights": ["pissa"]}, "base model's weights"),
        ({"init_lora_weights": "pissa", "alora_invocation_tokens": [1]}, "cannot go with alora_invocation_tokens"),
        ({"init_lora_weights": "pissa", "lora_bias": True}, "cannot go with lora_bias"),
        ({"init_lora_weights": "olora", "target_parameters": ["gate.weight"]}, "cannot go with target_parameters"),
        ({"init_lora_weights": "corda"}, "base model's weights"),
        ({"init_lora_weights": "loftq"}, "base model's weights"),
        ({"r": 0}, "r must be a positive integer"),
        ({"r": True}, "r must be a positive integer"),
        ({"r": 8.0}, "r must be a positive integer"),
        ({"lora_alpha": "16"}, "lora_alpha must be a number from -1e6 to 1e6"),
        ({"lora_alpha": 1000001}, "lora_alpha must be a number from -1e6 to 1e6"),
        ({"lora_alpha": 1e300}, "lora_alpha must be a number from -1e6 to 1e6"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern"),
        ({"rank_pattern": [1]}, "rank_pattern"),
        ({"target_modules": None}, "target_modules"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": [1]}, "target_modules"),
        ({"target_modules": {"a": 1}}, "target_modules"),
        ({"target_modules": "q.*", "layers_to_transform": [0]}, "cannot go with"),
        ({"layers_pattern": "layers"}, "needs layers_to_transform"),
        ({"layers_pattern": "(a+)+", "layers_to_transform": [0]}, "plain names"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform"),
        ({"layers_to_transform": [0] * 4097}, "at most 4096 integers"),
        ({"layers_pattern": [f"h{i}" for i in range(65)], "layers_to_transform": [0]}, "at most 64 plain names"),
        ({"alora_invocation_tokens": [1] * 4097}, "4096 are allowed"),
        ({"use_rslora": "yes"}, "use_rslora"),
    ],
)
def test_what_would_change_the_maths_or_makes_no_sense_is_refused(setting: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidAdapterError, match=words):
        parse(**setting)


def test_everything_that_peft_trains_beside_lora_is_understood() -> None:
    config = parse(
        bias="all",
        modules_to_save=["lm_head"],
        target_parameters=["experts.down_proj"],
        trainable_token_indices={"embed_tokens": [5, 7]},
        alora_invocation_tokens=[1, 2],
        ensure_weight_tying=True,
    )
    assert (config.bias, config.modules_to_save) == ("all", ("lm_head",))
    assert parse(use_dora=True).use_dora
    assert config.target_parameters == ("experts.down_proj",)
    assert config.trained_tokens == (("embed_tokens", (5, 7)),)
    assert config.invocation_tokens == (1, 2)
    assert config.ensure_weight_tying
    assert parse(lora_bias=True).lora_bias
    assert parse(trainable_token_indices=[3]).trained_tokens == (("", (3,)),)


@pytest.mark.parametrize(("value", "init"), [("pissa", "pissa"), ("olora", "olora"), ("OLoRA", "olora")])
def test_start_that_can_be_undone_is_noted(value: str, init: str) -> None:
    assert parse(init_lora_weights=value) == dataclasses.replace(parse(), init=init)


def test_every_reason_is_told_at_once() -> None:
    reasons = reasons_of(json.dumps(PLAIN | {"use_dora": 2, "bias": "some", "r": "x", "new": 1}).encode())
    assert len(reasons) == 4


def test_ranks_above_the_limit_are_refused_wherever_they_stand() -> None:
    for change in ({"r": 65}, {"rank_pattern": {"q_proj": 65}}):
        assert "--max-lora-rank 64" in reasons_of(json.dumps(PLAIN | change).encode(), max_rank=64)[0]
    assert parse_config(json.dumps(PLAIN | {"r": 64}).encode(), max_rank=64).ranks.r == 64


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"not json",
        b"[]",
        b"null",
        b"\xff\xfe{",
        b'{"r": 1, "r": 2}',
        b'{"peft_type": "LORA", "r": NaN}',
        json.dumps(PLAIN | {"base_model_name_or_path": "\ud800"}).encode(),
        b"[" * 100_000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b'{"a": [[[[[[[[[[1]]]]]]]]]]}',
        b'{"r": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda text: str(text[:20]),
)
def test_text_that_is_no_sound_json_object_is_refused(text: bytes) -> None:
    assert reasons_of(text)


def test_byte_order_mark_is_passed_over() -> None:
    assert parse_config(b"\xef\xbb\xbf" + json.dumps(PLAIN).encode()).ranks.r == 8


KEYS = st.sampled_from(
    [*PeftConfig.__dataclass_fields__, "lora_alpha", "peft_type", "bias", "use_dora", "new", "init_lora_weights"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("ab.*", max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab.*", max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(KEYS, VALUES))
def test_any_json_is_either_understood_or_refused(changes: dict[str, Any]) -> None:
    with suppress(InvalidAdapterError):
        assert parse_config(json.dumps(PLAIN | changes).encode()).ranks.r >= 1


@given(st.binary(max_size=200))
def test_any_bytes_are_either_understood_or_refused(text: bytes) -> None:
    with pytest.raises(InvalidAdapterError):
        parse_config(text)
