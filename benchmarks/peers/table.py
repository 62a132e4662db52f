"""Every engine that a side by side can measure."""

from __future__ import annotations

from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.lora_serve import LoraServe
from benchmarks.peers.peft import Peft
from benchmarks.peers.seam import Peer
from benchmarks.peers.transformers_batching import TransformersBatching
from benchmarks.peers.vllm import Vllm

OURS = "lora_serve"
DTYPES = {"float32": ("-float32", "-f32"), "bfloat16": ("-bfloat16", "-bf16")}  # type -> endings of peers' names
ALL: tuple[Peer, ...] = (
    LoraServe(),
    Vllm("float32"),
    Vllm("bfloat16"),
    Vllm("float32", has_lora=False),
    Vllm("bfloat16", has_lora=False),
    LlamaCpp("f16"),
    LlamaCpp("f32"),
    LlamaCpp("bf16"),
    Peft("float32"),
    Peft("bfloat16"),
    TransformersBatching("float32"),
    TransformersBatching("bfloat16"),
)


def families() -> tuple[str, ...]:
    """Names of engines without their configurations, ours first."""
    return tuple(dict.fromkeys(peer.family for peer in ALL))


def members(family: str, dtype: str | None = None) -> tuple[Peer, ...]:
    """Its configurations; with `dtype` those of that type, and this server told to take it. Raises KeyError."""
    found = tuple(peer for peer in ALL if family in (peer.family, peer.name))
    if not found:
        raise KeyError(f"{family} is none of {', '.join(families())}")
    if dtype is None:
        return found
    return tuple(
        LoraServe(("--dtype", dtype)) if isinstance(peer, LoraServe) else peer
        for peer in found
        if isinstance(peer, LoraServe) or peer.name.endswith(DTYPES[dtype])
    )
