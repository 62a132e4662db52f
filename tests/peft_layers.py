"""What a tiny model is made of, as far as an adapter can aim at it: names only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True)
class Layers:
    """Names of a model's parts; "last" names are the last part of a module's path, as in target_modules."""

    linears: tuple[str, ...]  # last names, the output head left out
    biased_linears: tuple[str, ...]  # last names of those of them that have a bias
    attention_path: str  # the path of one linear layer of the last attention block
    stack: str  # the name of the list of blocks: "layers" or "h"
    embedding: str  # last name
    head: str  # last name
    norms: tuple[str, ...]  # last names
    experts: tuple[str, ...]  # parameters that hold the weights of every expert
    routers: tuple[str, ...]  # parameters that choose among the experts
    has_bias: bool  # anywhere, norms included
    is_conv1d: bool  # its linear layers keep their weights transposed, as gpt2's do
    outside: str | None = None  # a pattern of the layers that no text runs through, such as a vision tower's
    unfit: str | None = None  # a pattern of linear layers that return more than a product, which PEFT cannot run

    @property
    def attention(self) -> str:
        """The last name of `attention_path`."""
        return self.attention_path.rpartition(".")[2]


# Names that PEFT takes for parts of the experts, as soon as a model has any.
_OF_EXPERTS = frozenset({"gate_proj", "up_proj", "down_proj"})


def narrowed(layers: Layers) -> Layers:
    """The layers without those that PEFT would turn into experts' weights, which not every kind can change."""
    linears = tuple(name for name in layers.linears if name not in _OF_EXPERTS)
    biased = tuple(name for name in layers.biased_linears if name in linears)
    path, _, last = layers.attention_path.rpartition(".")
    return replace(
        layers, linears=linears, biased_linears=biased, attention_path=f"{path}.{last if last in linears else 'q_proj'}"
    )


def read_layers(model: PreTrainedModel) -> Layers:
    """The names of a model that transformers has built and that generates text."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    outside = _outside(model)
    is_met = re.compile(outside or r"(?!)").fullmatch
    unfit = [
        re.escape(n)
        for n, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and "Router" in type(m).__name__
    ]
    modules = {
        name: module for name, module in model.named_modules() if not is_met(name) and re.escape(name) not in unfit
    }
    linears = {n: m for n, m in modules.items() if isinstance(m, torch.nn.Linear | Conv1D) and m is not head}
    attention = [name for name in linears if re.search(r"attn|attention", name)][-1]
    parameters = {name: tensor for name, tensor in model.named_parameters() if not is_met(name)}
    return Layers(
        linears=_last(linears),
        biased_linears=_last(name for name, module in linears.items() if module.bias is not None),
        attention_path=attention,
        stack=re.findall(r"(\w+)\.\d+\.", attention)[0],
        embedding=_last(name for name, module in modules.items() if module is embedding)[0],
        head=_last(name for name, module in modules.items() if module is head)[0],
        norms=_last(name for name, module in modules.items() if "Norm" in type(module).__name__),
        experts=_block_names(name for name, tensor in parameters.items() if tensor.dim() == 3),
        routers=_block_names(name for name in parameters if name.endswith((".gate.weight", ".router.weight"))),
        has_bias=any(name.endswith("bias") for name in parameters),
        is_conv1d=any(isinstance(module, Conv1D) for module in linears.values()),
        outside=outside,
        unfit="|".join(unfit) or None,
    )


def _outside(model: PreTrainedModel) -> str | None:
    if model.config.get_text_config() is model.config:
        return None
    seen = set[str]()
    with ExitStack() as hooks, torch.inference_mode():
        for path, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(lambda *_, path=path: seen.add(path)))
        model(input_ids=torch.arange(20, 24)[None], use_cache=False)
    parts = {".".join(path.split(".")[:n]) for path, _ in model.named_parameters() for n in (1, 2)}
    unseen = sorted(part for part in parts if not any(f"{path}.".startswith(f"{part}.") for path in seen))
    return rf"({'|'.join(map(re.escape, unseen))})(\..*)?" if unseen else None


def _last(paths: Iterator[str] | dict[str, torch.nn.Module]) -> tuple[str, ...]:
    return tuple(sorted({path.rpartition(".")[2] for path in paths}))


def _block_names(paths: Iterator[str]) -> tuple[str, ...]:
    """Names inside a block, the same in every block: "mlp.experts.down_proj"."""
    return tuple(sorted({re.split(r"\.\d+\.", path)[-1] for path in paths}))
