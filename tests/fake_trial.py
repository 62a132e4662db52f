"""A trial without a base model: counts what an adapter's tensors take, and says of every probe the same."""

from __future__ import annotations

from dataclasses import dataclass, field

from lora_serve.adapters.weights import SavedAdapter
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.commands import ProbeResult


@dataclass
class FakeTrial:
    """See `lora_serve/adapters/trial.py`."""

    result: ProbeResult = field(default_factory=lambda: ProbeResult(1.0, 0.0, 1.0))
    probed: list[AdapterRef] = field(default_factory=list)

    def num_bytes(self, saved: SavedAdapter) -> int:
        return sum(
            tensor.nbytes
            for linear in saved.linears.values()
            for tensor in (linear.a, linear.b, linear.magnitude, linear.bias, linear.lora_bias)
            if tensor is not None
        )

    def probe(self, adapter: AdapterRef, token_ids: tuple[int, ...]) -> ProbeResult:
        self.probed.append(adapter)
        return self.result
