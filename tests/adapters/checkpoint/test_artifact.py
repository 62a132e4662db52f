from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lora_serve.adapters.checkpoint.artifact import read_artifact
from lora_serve.adapters.checkpoint.content import adapter_digest
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.model_spec import ModelSpec
from lora_serve.model.lora.validation import check_values

if TYPE_CHECKING:
    from tests.adapters.conftest import MakeAdapter

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def reasons_of(folder: Path, spec: ModelSpec, **limits: Any) -> str:
    with pytest.raises(InvalidAdapterError) as caught:
        check_values(folder, read_artifact(folder, spec, **limits))
    return "; ".join(caught.value.reasons)


def test_sound_adapter_binds_every_tensor(make_adapter: MakeAdapter, spec: ModelSpec) -> None:
    artifact = read_artifact(make_adapter(rank=4, targets=("q_proj", "down_proj")), spec)
    assert len(artifact.bound.linears) == 4
    bound = artifact.bound.linears["model.layers.1.mlp.down_proj"]
    assert (bound.rank, bound.scale) == (4, 2.0)


def test_digest_is_of_the_two_files_content_only(make_adapter: MakeAdapter, spec: ModelSpec) -> None:
    first, second, other = make_adapter("a"), make_adapter("b"), make_adapter("c", seed=1)
    (second / "README.md").write_text("hello")
    assert adapter_digest(first) == adapter_digest(second) == read_artifact(second, spec).digest
    assert adapter_digest(other) != adapter_digest(first)
    (first / "adapter_config.json").write_text((first / "adapter_config.json").read_text() + " ")
    assert adapter_digest(first) != adapter_digest(second)


def test_digest_is_what_the_docstring_says(make_adapter: MakeAdapter) -> None:
    folder = make_adapter()
    parts = [hashlib.sha256((folder / name).read_bytes()).digest() for name in sorted(os.listdir(folder))]
    assert adapter_digest(folder) == "sha256:" + hashlib.sha256(b"".join(parts)).hexdigest()


@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
@pytest.mark.parametrize("suffix", [".weight", ".default.weight"])
def test_names_with_and_without_prefix_and_adapter_name_bind(
    make_adapter: MakeAdapter, spec: ModelSpec, prefix: str, suffix: str
) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            short = name.removeprefix("base_model.model.").removesuffix(".weight")
            tensors[prefix + short + suffix] = tensors.pop(name)

    assert len(read_artifact(make_adapter(change=rename), spec).bound.linears) == 4


def drop_b(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{Q0}.lora_B.weight"]


def drop_module(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{Q0}.lora_A.weight"], tensors[f"{Q0}.lora_B.weight"]


def wrong_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{Q0}.lora_A.weight"] = torch.ones(4, 17)


def wrong_rank(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{Q0}.lora_A.weight"] = torch.ones(3, 16)
    tensors[f"{Q0}.lora_B.weight"] = torch.ones(16, 3)


def transposed(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{Q0}.lora_A.weight"] = torch.ones(16, 4)


def empty(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{Q0}.lora_A.weight"] = torch.ones(0, 16)


def other_module(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight"] = torch.ones(4, 16)


def embedding(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.ones(4, 32)


def magnitude(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{Q0}.lora_magnitude_vector"] = torch.ones(16)


def twice(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.lora_A.weight"] = torch.ones(4, 16)


def not_a_number(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{Q0}.lora_B.weight"][3, 2] = float("nan")


def infinite(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{Q0}.lora_A.weight"][0, 0] = float("-inf")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop_b, "lora_B of model.layers.0.self_attn.q_proj is missing"),
        (drop_module, "target_modules names model.layers.0.self_attn.q_proj, but the file has no weights for it"),
        (wrong_shape, r"lora_A.weight' has shape \[4, 17\]"),
        (wrong_rank, r"lora_A.weight' has shape \[3, 16\].*ask for \[4, 16\]"),
        (transposed, r"ask for \[4, 16\]"),
        (empty, r"has shape \[0, 16\]"),
        (other_module, "layers.7.self_attn.q_proj.lora_A.weight' belongs to no module of LlamaForCausalLM"),
        (embedding, "lora_embedding_A' belongs to no module"),
        (magnitude, "lora_magnitude_vector' is there, but the config does not say that it is trained"),
        (twice, "there twice"),
        (not_a_number, "q_proj.lora_B.weight' holds NaN or infinity"),
        (infinite, "q_proj.lora_A.weight' holds NaN or infinity"),
    ],
)
def test_broken_tensors_are_refused_by_name(
    make_adapter: MakeAdapter, spec: ModelSpec, change: Any, words: str
) -> None:
    assert re.search(words, reasons_of(make_adapter(change=change), spec))


def test_adapter_of_another_base_is_refused(make_adapter: MakeAdapter, spec: ModelSpec) -> None:
    wide = {path: dataclasses.replace(linear, in_features=99) for path, linear in spec.linears.items()}
    assert "asks for" in reasons_of(make_adapter(), dataclasses.replace(spec, linears=wide)).replace(
        "ask for", "asks for"
    )


def test_weights_that_the_config_does_not_target_are_refused(make_adapter: MakeAdapter, spec: ModelSpec) -> None:
    words = reasons_of(make_adapter(settings={"target_modules": ["q_proj"]}), spec)
    assert "weights for model.layers.0.mlp.down_proj, but the config does not target it" in words


def test_layers_left_out_by_layers_to_transform_need_no_weights(make_adapter: MakeAdapter, spec: ModelSpec) -> None:
    def only_layer_1(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".layers.0." in name]:
            del tensors[name]

    folder = make_adapter("one layer", settings={"layers_to_transform": [1]}, change=only_layer_1)
    assert len(read_artifact(folder, spec).bound.linears) == 2
    words = reasons_of(make_adapter("both layers", settings={"layers_to_transform": [1]}), spec)
    assert "weights for model.layers.0.mlp.down_proj, but the config does not target it" in words


def test_rank_above_the_limit_is_refused(make_adapter: MakeAdapter, spec: ModelSpec) -> None:
    assert "--max-lora-rank 3" in reasons_of(make_adapter(rank=4), spec, max_rank=3)


@pytest.mark.parametrize("side", ["lora_A", "lora_B"])
def test_adapter_that_changes_nothing_is_refused_unless_allowed(
    make_adapter: MakeAdapter, spec: ModelSpec, side: str
) -> None:
    def zero(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if side in name:
                tensor.zero_()

    folder = make_adapter(change=zero)
    assert "changes nothing" in reasons_of(folder, spec)
    check_values(folder, read_artifact(folder, spec), allow_noop=True)


def test_adapter_of_scale_zero_changes_nothing(make_adapter: MakeAdapter, spec: ModelSpec) -> None:
    assert "changes nothing" in reasons_of(make_adapter(settings={"lora_alpha": 0}), spec)


def test_one_module_that_changes_something_is_enough(make_adapter: MakeAdapter, spec: ModelSpec) -> None:
    folder = make_adapter(change=lambda tensors: tensors[f"{Q0}.lora_B.weight"].zero_())
    check_values(folder, read_artifact(folder, spec))


def test_missing_files_are_named(tmp_path: Path, spec: ModelSpec) -> None:
    words = reasons_of(tmp_path, spec)
    assert "adapter_config.json is missing" in words
    assert "adapter_model.safetensors is missing" in words


def test_pickle_checkpoint_is_refused_in_words(make_adapter: MakeAdapter, spec: ModelSpec) -> None:
    folder = make_adapter()
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert "pickle" in reasons_of(folder, spec)


def test_broken_config_and_broken_weights_are_both_told(make_adapter: MakeAdapter, spec: ModelSpec) -> None:
    folder = make_adapter(settings={"layer_replication": [[0, 1]]})
    with (folder / "adapter_model.safetensors").open("ab") as file:
        file.write(b"x")
    words = reasons_of(folder, spec)
    assert "layer replication" in words
    assert "after its last tensor" in words


def test_huge_config_is_not_even_read(make_adapter: MakeAdapter, spec: ModelSpec) -> None:
    folder = make_adapter()
    os.truncate(folder / "adapter_config.json", 2**21)
    assert "larger than" in reasons_of(folder, spec)


def test_file_that_is_a_link_is_refused(make_adapter: MakeAdapter, spec: ModelSpec, tmp_path: Path) -> None:
    folder = make_adapter()
    shutil.move(folder / "adapter_config.json", tmp_path / "elsewhere")
    (folder / "adapter_config.json").symlink_to(tmp_path / "elsewhere")
    assert "missing" in reasons_of(folder, spec)


def test_config_keys_are_text_for_the_card_only(make_adapter: MakeAdapter, spec: ModelSpec) -> None:
    folder = make_adapter(settings={"base_model_name_or_path": "../../etc/passwd"})
    assert read_artifact(folder, spec).config.base_model == "../../etc/passwd"
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
