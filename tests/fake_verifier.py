"""A verifier without a base model: counts what an adapter's tensors take, and says of every smoke test the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from lora_serve.adapters.checkpoint.saved import SavedAdapter
from lora_serve.adapters.registration.verification import StagedAdapter
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.messages import AdapterSize, SmokeTestResult
from lora_serve.model.lora.validation import convert, validated


@dataclass
class FakeVerifier:
    """See `lora_serve/adapters/registration/verification.py`."""

    result: SmokeTestResult = field(default_factory=lambda: SmokeTestResult(1.0, 0.0, 1.0))
    smoke_tested: list[AdapterRef] = field(default_factory=list)
    undone: list[str] = field(default_factory=list)  # initialisations

    def convert(self, staged: StagedAdapter) -> None:
        convert(staged, self.converted)

    def validate(self, staged: StagedAdapter, *, allow_noop: bool) -> AdapterSize:
        saved = validated(staged, allow_noop=allow_noop)
        staged.budget.check()
        return AdapterSize(saved.rank, self.num_bytes(saved))

    def converted(self, saved: SavedAdapter, init: str, check: Callable[[], None] = lambda: None) -> SavedAdapter:
        """As if A0 were all ones and B0 minus one."""
        self.undone.append(init)
        linears = {
            path: replace(linear, a=_with_ones(linear.a), b=_with_ones(linear.b))
            for path, linear in saved.linears.items()
        }
        return replace(saved, linears=linears)

    def num_bytes(self, saved: SavedAdapter) -> int:
        return sum(
            tensor.nbytes
            for linear in saved.linears.values()
            for tensor in (linear.a, linear.b, linear.magnitude, linear.bias, linear.lora_bias)
            if tensor is not None
        )

    def smoke_test(self, adapter: AdapterRef, token_ids: tuple[int, ...]) -> SmokeTestResult:
        self.smoke_tested.append(adapter)
        return self.result


def _with_ones(factor: torch.Tensor | None) -> torch.Tensor | None:
    return None if factor is None else torch.cat([factor, torch.ones_like(factor)])
