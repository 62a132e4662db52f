"""What a tiny model is made of, as far as an adapter can aim at it: names only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

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

    @property
    def attention(self) -> str:
        """The last name of `attention_path`."""
        return self.attention_path.rpartition(".")[2]


def read_layers(model: PreTrainedModel) -> Layers:
    """The names of a causal language model that transformers has built."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear | Conv1D) and m is not head}
    attention = [name for name in linears if re.search(r"attn|attention", name)][-1]
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
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
    )


def _last(paths: Iterator[str] | dict[str, torch.nn.Module]) -> tuple[str, ...]:
    return tuple(sorted({path.rpartition(".")[2] for path in paths}))


def _block_names(paths: Iterator[str]) -> tuple[str, ...]:
    """Names inside a block, the same in every block: "mlp.experts.down_proj"."""
    return tuple(sorted({re.split(r"\.\d+\.", path)[-1] for path in paths}))
