"""The values of settings whose choices are the files of a folder: engine hosts, policies, routers, attention backends,
LoRA kernels, formats of tool calls and of reasoning.

The folder is the list: a new file is a new value and is named nowhere else. Files are listed, not imported, as this
floor knows nothing above it and `--help` must not load torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

_PACKAGE = Path(__file__).parents[1]

# Names that vLLM or its users have for the same format.
TOOL_CALL_ALIASES = {"llama4_json": "llama3_json", "llama4_pythonic": "pythonic", "qwen": "hermes"}
REASONING_ALIASES = {"deepseek_v3": "deepseek_r1", "glm45": "deepseek_r1", "qwen3": "deepseek_r1"}


def names_in(folder: str) -> tuple[str, ...]:
    """The files of a folder of this package, without the seam `base.py` that they share."""
    files = (_PACKAGE / folder).glob("[!_]*.py")
    return tuple(sorted(file.stem for file in files if file.stem != "base"))


if TYPE_CHECKING:
    EngineHostName: TypeAlias = str
    PolicyName: TypeAlias = str
    RouterName: TypeAlias = str
    AttentionName: TypeAlias = str
    LoraKernelName: TypeAlias = str
    ToolCallFormatName: TypeAlias = str
    ReasoningFormatName: TypeAlias = str
else:
    EngineHostName = Literal[names_in("engine_host/hosts")]
    PolicyName = Literal[names_in("engine/policies")]
    RouterName = Literal[names_in("routing/routers")]
    AttentionName = Literal[("auto", *names_in("model/attention"))]
    LoraKernelName = Literal[("auto", *names_in("model/lora/kernels"))]
    ToolCallFormatName = Literal[("auto", "none", *names_in("text/tool_calls"), *TOOL_CALL_ALIASES)]
    ReasoningFormatName = Literal[("auto", "none", *names_in("text/reasoning"), *REASONING_ALIASES)]
