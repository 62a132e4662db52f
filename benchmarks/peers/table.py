"""Every engine that a side by side can measure."""

from __future__ import annotations

from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.lora_serve import LoraServe
from benchmarks.peers.peft import Peft
from benchmarks.peers.seam import Peer
from benchmarks.peers.transformers_batching import TransformersBatching
from benchmarks.peers.vllm import Vllm

OURS = "lora_serve"
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


def members(family: str) -> tuple[Peer, ...]:
    """Its configurations. Raises KeyError."""
    found = tuple(peer for peer in ALL if family in (peer.family, peer.name))
    if not found:
        raise KeyError(f"{family} is none of {', '.join(families())}")
    return found
