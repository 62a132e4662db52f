"""The start's check of mixtures of experts in rounded numbers, at the experts that the plain model chose.

Two experts of nearly equal scores may change places by a rounding, and all that follows differs then by more than a
rounding: random models were refused for it. What a rounding explains is told apart from what it does not: given the
plain model's experts and weights, the rows' numbers must be near its own, and the routers' own choices, made from the
same numbers but for roundings, must be its choices but for a few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lora_serve.core.batch import Batch, RowOutput
from lora_serve.core.errors import ModelError
from lora_serve.model.experts import expert_modules

_MOST_OTHERS = 0.1  # of the pairs of a token and an expert; 0.02 were seen of random routers with 128 experts
Run = Callable[[Batch], Sequence[RowOutput]]


class ExpertChoices:
    """The experts and weights of each token of a probe's rows, by module of experts."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = list(expert_modules(module))
        self._noted: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {part: [] for part in self._parts}
        self._length = 0
        self._num_pairs = self._num_alike = 0

    @contextmanager
    def noted(self, probe: Sequence[Sequence[int]]) -> Iterator[None]:
        """Notes what is chosen in the block, in one pass of the probe's rows padded to the longest."""
        self._length = max(map(len, probe))

        def note(module: nn.Module, given: tuple[Any, ...]) -> None:
            self._noted[module].append((given[1], given[2]))

        with self._hooks(note):
            yield

    @property
    def are_known(self) -> bool:
        """True if every module of experts was called once, with experts and weights of each token."""
        return bool(self._parts) and all(len(calls) == 1 for calls in self._noted.values())

    def given(self, run: Run) -> Run:
        """`run` of steps of the probe (a row's id is its place there) with the choices that were noted."""

        def run_given(batch: Batch) -> Sequence[RowOutput]:
            rows = sorted(batch.rows, key=lambda row: len(row.token_ids) > 1)  # as the runner packs them
            places = torch.tensor(
                [row.sequence_id * self._length + row.start + i for row in rows for i in range(len(row.token_ids))]
            )

            def give(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
                x, own, *_ = given
                experts, weights = (one[places.to(one.device)] for one in self._noted[module][0])
                is_alike = (own[:, :, None] == experts[:, None]).any(-1)
                self._num_pairs += is_alike.numel()
                self._num_alike += int(is_alike.sum())
                return x, experts, weights

            with self._hooks(give):
                return run(batch)

        return run_given

    def check_alike(self, architecture: str) -> None:
        """Raises ModelError if the routers chose other experts than the plain model more often than roundings do."""
        others = 1.0 - self._num_alike / max(self._num_pairs, 1)
        if others > _MOST_OTHERS:
            raise ModelError(
                f"{architecture} cannot be served exactly: its routers choose other experts than the model's own for "
                f"{others:.0%} of their tokens (allowed: {_MOST_OTHERS:.0%})"
            )

    def _hooks(self, hook: Callable[..., Any]) -> ExitStack:
        with ExitStack() as hooks:
            for part in self._parts:
                hooks.enter_context(part.register_forward_pre_hook(hook))
            return hooks.pop_all()
