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
from lora_serve.model.loading.observation import is_linear

_MOST_OTHERS = 0.1  # of the pairs of a token and an expert; 0.02 were seen of random routers with 128 experts
Run = Callable[[Batch], Sequence[RowOutput]]


class ExpertChoices:
    """The experts and weights of each token of a probe's rows, by module of experts; of a router that tells its experts
    by scores alone (Llama 4), the scores.
    """

    def __init__(self, module: nn.Module) -> None:
        self._experts = list(expert_modules(module))
        self._routers = [part for part in module.modules() if _tells_scores(part)]
        self._noted: dict[nn.Module, list[tuple[Tensor, ...]]] = {p: [] for p in (*self._experts, *self._routers)}
        self._length = 0
        self._num_pairs = self._num_alike = 0

    @contextmanager
    def noted(self, probe: Sequence[Sequence[int]]) -> Iterator[None]:
        """Notes what is chosen in the block, in one pass of the probe's rows padded to the longest."""
        self._length = max(map(len, probe))

        def note(module: nn.Module, given: tuple[Any, ...]) -> None:
            self._noted[module].append((given[1], given[2]))

        def note_scores(module: nn.Module, _: Any, output: tuple[Tensor, Tensor]) -> None:
            self._noted[module].append(output[:1])

        with self._hooks(note, note_scores):
            yield

    @property
    def are_known(self) -> bool:
        """True if every module of experts was called once, with experts and weights of each token."""
        return bool(self._noted) and all(len(calls) == 1 for calls in self._noted.values())

    def given(self, run: Run) -> Run:
        """`run` of steps of the probe (a row's id is its place there) with the choices that were noted."""

        def run_given(batch: Batch) -> Sequence[RowOutput]:
            rows = sorted(batch.rows, key=lambda row: len(row.token_ids) > 1)  # as the runner packs them
            places = torch.tensor(
                [row.sequence_id * self._length + row.start + i for row in rows for i in range(len(row.token_ids))]
            )

            def noted(module: nn.Module) -> list[Tensor]:
                return [one[places.to(one.device)] for one in self._noted[module][0]]

            def give(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
                x, own, *_ = given
                experts, weights = noted(module)
                self._count((own[:, :, None] == experts[:, None]).any(-1))
                return x, experts, weights

            def give_scores(module: nn.Module, _: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
                (scores,) = noted(module)
                self._count(output[0][scores > 0] > 0)
                return scores, output[1]

            with self._hooks(give, give_scores):
                return run(batch)

        return run_given

    def _count(self, is_alike: Tensor) -> None:
        self._num_pairs += is_alike.numel()
        self._num_alike += int(is_alike.sum())

    def check_alike(self, architecture: str) -> None:
        """Raises ModelError if the routers chose other experts than the plain model more often than roundings do."""
        others = 1.0 - self._num_alike / max(self._num_pairs, 1)
        if others > _MOST_OTHERS:
            raise ModelError(
                f"{architecture} cannot be served exactly: its routers choose other experts than the model's own for "
                f"{others:.0%} of their tokens (allowed: {_MOST_OTHERS:.0%})"
            )

    def _hooks(self, to_experts: Callable[..., Any], from_router: Callable[..., Any]) -> ExitStack:
        with ExitStack() as hooks:
            for part in self._experts:
                hooks.enter_context(part.register_forward_pre_hook(to_experts))
            for part in self._routers:
                hooks.enter_context(part.register_forward_hook(from_router))
            return hooks.pop_all()


def _tells_scores(part: nn.Module) -> bool:
    """True for a linear layer that chooses by its own forward: it returns a number for each expert, zero for those that
    were not chosen, and the logits.
    """
    return isinstance(part, nn.Linear) and not is_linear(part) and hasattr(part, "top_k")
