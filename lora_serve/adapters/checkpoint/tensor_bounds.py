"""How much an adapter's header may hold, by the base model alone: known before a name of it is read."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.adapters.checkpoint.expert_layers import num_old_layers
from lora_serve.core.model_spec import ModelSpec

_PER_MODULE = 12  # tensors of any method; LoKr has six at most
_PER_PARAMETER = 6  # its copy, the original, and a low-rank delta, each also under a second name
_FOR_ALL = 64  # that belong to no module, as VeRA's
_ENTRY_BYTES = 512  # of a tensor in the header, beside its module's path
_METADATA_BYTES = 2**18


@dataclass(frozen=True, slots=True)
class HeaderBounds:
    """What is beyond them fits no adapter of the base model."""

    num_tensors: int
    num_bytes: int

    @classmethod
    def of(cls, spec: ModelSpec) -> HeaderBounds:
        """Generous: what is within them is looked at name by name."""
        paths = spec.linears.keys() | spec.embeddings.keys() | spec.modules.keys()
        num_modules = len(paths) + num_old_layers(spec)
        num_parameters = sum(map(len, spec.modules.values()))
        num_tensors = _PER_MODULE * num_modules + _PER_PARAMETER * num_parameters + _FOR_ALL
        longest = max(map(len, paths), default=0)
        return cls(num_tensors, _METADATA_BYTES + num_tensors * (longest + _ENTRY_BYTES))
