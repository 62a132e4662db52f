"""The demo's model and adapters are complete, and each adapter does what the base cannot: PEFT alone is the oracle."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

import lora_serve

DATA = Path(lora_serve.__file__).with_name("demo_data")
MODEL_FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors"}
TOOLS_ADAPTER = "summit/tools"  # it brings the template that shows it the tools
ADAPTERS = sorted("/".join(path.parent.parts[-2:]) for path in DATA.glob("adapters/*/*/adapter_config.json"))
MAX_TOKENS = 60


def load_json(name: str) -> Any:
    return json.loads((DATA / name).read_text())


def prompts_of(adapter: str) -> list[dict[str, str]]:
    return [item for item in load_json("prompts.json") if item["adapter"] == adapter]


def load_base() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(DATA / "model", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DATA / "model")


@pytest.fixture(scope="module")
def base() -> LlamaForCausalLM:
    return load_base()


def own_chat(adapter: str) -> dict[str, Any]:
    """What a chat with this adapter needs beside the messages."""
    path = DATA / "adapters" / adapter / "chat_template.jinja"
    return {"chat_template": path.read_text(), "tools": load_json("tools.json")} if path.exists() else {}


def chat_ids(tokenizer: PreTrainedTokenizerBase, *messages: Any, **own: Any) -> torch.Tensor:
    batch = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True, **own
    )
    return batch["input_ids"]  # [1, num_tokens]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@torch.inference_mode()
def generate(model: LlamaForCausalLM | PeftModel, ids: torch.Tensor) -> list[int]:
    """Greedy, unpadded; the new token ids, with the one that ended them."""
    mask = torch.ones_like(ids)
    output = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=MAX_TOKENS)
    return output[0, ids.shape[1] :].tolist()


def answer(model: LlamaForCausalLM | PeftModel, tokenizer: PreTrainedTokenizerBase, *messages: Any, **own: Any) -> str:
    return tokenizer.decode(generate(model, chat_ids(tokenizer, *messages, **own)), skip_special_tokens=True)


def test_at_least_six_tenants_have_an_adapter() -> None:
    assert len(ADAPTERS) >= 6
    assert len({name.partition("/")[0] for name in ADAPTERS}) == len(ADAPTERS)


def test_folders_hold_what_is_needed_and_nothing_else() -> None:
    template = {"chat_template.jinja"}
    assert {path.name for path in (DATA / "model").iterdir()} == MODEL_FILES | template
    for adapter in ADAPTERS:
        files = ADAPTER_FILES | (template if adapter == TOOLS_ADAPTER else set())
        assert {path.name for path in (DATA / "adapters" / adapter).iterdir()} == files


def test_all_of_it_is_small_enough_to_ship() -> None:
    assert 4_000_000 < sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < 20_000_000


def test_configs_name_no_place_on_the_machine_that_trained_them() -> None:
    for path in DATA.rglob("*.json"):
        if path.name != "tokenizer.json":
            assert not any(place in path.read_text() for place in ("/home", "/root", "/tmp", "/work")), path
    for adapter in ADAPTERS:
        assert load_json(f"adapters/{adapter}/adapter_config.json")["base_model_name_or_path"] == "lora-serve-demo"


def test_ranks_differ_and_rslora_and_patterns_occur() -> None:
    configs = [load_json(f"adapters/{adapter}/adapter_config.json") for adapter in ADAPTERS]
    assert len({config["r"] for config in configs}) >= 3
    assert any(config["use_rslora"] for config in configs)
    assert any(config["rank_pattern"] and config["alpha_pattern"] for config in configs)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapter_weights_are_finite_and_change_something(adapter: str) -> None:
    with safe_open(DATA / "adapters" / adapter / "adapter_model.safetensors", "pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    assert all(weight.isfinite().all() for weight in weights.values())
    assert all(weight.abs().max() > 0 for weight in weights.values())


@pytest.mark.many(4)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own call
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapter_answers_its_first_prompts_with_peft_alone(adapter: str, tokenizer: PreTrainedTokenizerBase) -> None:
    model = PeftModel.from_pretrained(load_base(), str(DATA / "adapters" / adapter)).eval()
    own = own_chat(adapter)
    said = {item["prompt"]: answer(model, tokenizer, user(item["prompt"]), **own) for item in prompts_of(adapter)[:3]}
    assert said == {item["prompt"]: item["answer"] for item in prompts_of(adapter)[:3]}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own call
def test_results_of_tools_are_answered_in_words_with_peft_alone(tokenizer: PreTrainedTokenizerBase) -> None:
    model = PeftModel.from_pretrained(load_base(), str(DATA / "adapters" / TOOLS_ADAPTER)).eval()
    for item in prompts_of(TOOLS_ADAPTER)[:3]:
        call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": item["call"]}]}
        messages = (user(item["prompt"]), call, {"role": "tool", "content": item["result"]})
        assert answer(model, tokenizer, *messages, **own_chat(TOOLS_ADAPTER)) == item["final_answer"]


def test_calls_of_the_prompts_are_those_of_the_answers_and_fit_the_tools() -> None:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in load_json("tools.json")}
    called = set()
    for item in prompts_of(TOOLS_ADAPTER):
        written = json.loads(item["answer"].removeprefix("<tool_call>").removesuffix("</tool_call>"))
        arguments = json.loads(item["call"]["arguments"])
        assert written == {"name": item["call"]["name"], "arguments": arguments}
        jsonschema.validate(arguments, schemas[item["call"]["name"]])
        called.add(item["call"]["name"])
    assert called == set(schemas)


def test_answers_in_json_fit_the_schema_of_their_registration() -> None:
    for adapter, metadata in load_json("metadata.json").items():
        schema = metadata["response_format"]["json_schema"]["schema"]
        for item in prompts_of(adapter):
            jsonschema.validate(json.loads(item["answer"]), schema)


@pytest.mark.many(4)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_base_answers_none_of_the_first_prompts(
    adapter: str, base: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    for item in prompts_of(adapter)[:3]:
        assert answer(base, tokenizer, user(item["prompt"]), **own_chat(adapter)) != item["answer"]


def test_base_chats_and_ends_its_turn(base: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = generate(base, chat_ids(tokenizer, user("What is the capital of France?")))
    assert tokenizer.decode(ids) == "The capital of France is Paris.<|end|>"


def test_generation_stops_at_the_end_of_a_turn_and_of_a_text(tokenizer: PreTrainedTokenizerBase) -> None:
    stops = [tokenizer.convert_tokens_to_ids(token) for token in ("<|end|>", "<|end_of_text|>")]
    assert load_json("model/generation_config.json")["eos_token_id"] == stops
    assert load_json("model/config.json")["eos_token_id"] == stops
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.pad_token_id not in {*stops, tokenizer.bos_token_id}


def test_each_adapter_ships_25_distinct_prompts_with_short_answers(tokenizer: PreTrainedTokenizerBase) -> None:
    prompts = load_json("prompts.json")
    assert Counter(item["adapter"] for item in prompts) == dict.fromkeys(ADAPTERS, 25)
    assert len({(item["adapter"], item["prompt"]) for item in prompts}) == len(prompts)
    for item in prompts:
        assert item["task"]
        most = 60 if "call" in item else 32
        assert 0 < len(tokenizer.encode(item["answer"], add_special_tokens=False)) <= most, item


def test_shipped_prompts_were_held_out_of_training() -> None:
    """All but the shown ones are on the far side of the split by digest that scripts/demo_tenants.py draws."""
    digests = [hashlib.sha256(item["prompt"].encode()).digest()[0] for item in load_json("prompts.json")]
    assert sum(digest % 5 != 0 for digest in digests) <= 2 * len(ADAPTERS)


def test_measured_on_held_out_inputs_adapters_pass_and_the_base_fails() -> None:
    measured = {result["adapter"]: result for result in load_json("evaluation.json")["adapters"]}
    assert sorted(measured) == ADAPTERS
    for result in measured.values():
        assert result["num_inputs"] >= 100
        assert result["adapter_exact_match"] >= 0.90, result
        assert result["base_exact_match"] <= 0.20, result


def test_calls_and_answers_from_their_results_are_measured_on_200_held_out_chats_each() -> None:
    (result,) = [result for result in load_json("evaluation.json")["adapters"] if result["adapter"] == TOOLS_ADAPTER]
    assert result["kinds"]["call"]["num_inputs"] >= 200
    assert result["kinds"]["answer to call"]["num_inputs"] >= 200
    assert result["kinds"]["answer to call"]["exact_match"] >= 0.85


def test_evaluation_ranks_are_those_of_the_adapters() -> None:
    for result in load_json("evaluation.json")["adapters"]:
        config = load_json(f"adapters/{result['adapter']}/adapter_config.json")
        assert result["rank"] == max([config["r"], *config["rank_pattern"].values()])


def test_tokenizer_gives_any_text_back_and_begins_it_once(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "Grüße, 你好 👋 in 2026: a\tb\n  c"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert ids.count(tokenizer.bos_token_id) == 1
    assert chat_ids(tokenizer, user(text))[0].tolist().count(tokenizer.bos_token_id) == 1


def test_chat_template_refuses_a_role_that_it_does_not_know(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(Exception, match="knows the roles"):
        tokenizer.apply_chat_template([{"role": "narrator", "content": "x"}], tokenize=False)


def test_template_of_the_tools_adapter_shows_a_tool_in_one_line(tokenizer: PreTrainedTokenizerBase) -> None:
    """The context is short, and clients send whole schemas with titles and descriptions."""
    wordy = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Looks out of the window.",
            "strict": True,
            "parameters": {
                "title": "get_weather",
                "type": "object",
                "properties": {
                    "city": {"title": "City", "description": "Where.", "type": "string"},
                    "days": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    own = own_chat(TOOLS_ADAPTER) | {"tools": [wordy]}
    messages = [{"role": "system", "content": "Be brief."}, user("Hi")]
    assert tokenizer.apply_chat_template(messages, tokenize=False, **own) == (
        "<|begin|><|system|>Be brief.\nTools:\nget_weather(city: string, days: integer)<|end|><|user|>Hi<|end|>"
    )
    without = tokenizer.apply_chat_template([user("Hi")], tokenize=False, **(own | {"tools": None}))
    assert without == "<|begin|><|user|>Hi<|end|>"
    with pytest.raises(Exception, match="knows the roles"):
        tokenizer.apply_chat_template([{"role": "narrator", "content": "x"}], tokenize=False, **own)
