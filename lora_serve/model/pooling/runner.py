"""Runs one batch of pooling rows; no KV cache, no sampling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lora_serve.core.batch import Batch, BlockMoves, Row, RowAdapter, RowOutput
from lora_serve.core.config import ModelConfig
from lora_serve.core.errors import ModelError, NumericalError
from lora_serve.core.messages import SmokeTestResult
from lora_serve.core.request import PoolingParams
from lora_serve.model.lora.adapted_model import AdaptedModel
from lora_serve.model.lora.changes import ReplacedLinear
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.pooling.forward import PoolingRow, PoolingStep
from lora_serve.model.pooling.loading import PoolingParts, is_exact
from lora_serve.model.runner.model_runner import AdapterRunner, effect
from lora_serve.model.step_context import OutputWidths
from lora_serve.model.system.device_memory import within_memory


class PoolingModel(AdaptedModel[PoolingStep]):
    """Rows in, one vector per row out."""

    def __init__(self, parts: PoolingParts, slots: LoraSlots, config: ModelConfig) -> None:
        """Raises ModelError if its answers are not the plain model's."""
        super().__init__(parts.loaded, slots, config, parts.context)
        self._forward = parts.forward
        self._layout = parts.layout
        dtype = next(parts.loaded.module.parameters()).dtype
        if not is_exact(self.answers(parts.probe), parts.expected, dtype):
            raise ModelError(f"{self.spec.architecture} cannot be served exactly: its replaced layers differ")

    def answers(self, rows: tuple[PoolingRow, ...], own_labels: OutputWidths | None = None) -> Tensor:
        """[num_rows, dimension or width] float32; `own_labels`: if rows have label layers of their own."""
        return self._forward(self._layout.step(rows, own_labels))


class PoolingRunner(AdapterRunner):
    """Implements `engine.Runner` for models that answer with one vector."""

    def __init__(self, model: PoolingModel, slots: LoraSlots) -> None:
        super().__init__(slots)
        self._model = model
        pooling = model.spec.pooling
        assert pooling is not None
        self._heads = slots.changes_of(pooling.label_layer) if pooling.label_layer else {}
        self._num_labels = len(pooling.labels)

    def run(self, batch: Batch) -> list[RowOutput]:
        return within_memory(self._model.device, lambda: self._outputs(batch, self._run_rows))

    def move_blocks(self, moves: BlockMoves) -> None:
        """There is no KV cache, so nothing moves."""

    def _run_rows(self, rows: list[Row]) -> dict[int, RowOutput]:
        answers = self._answers([_pooling_row(row) for row in rows])
        return {row.sequence_id: _output(row, own) for row, own in zip(rows, answers, strict=True)}

    def smoke_test(self, adapter: RowAdapter, token_ids: tuple[int, ...]) -> SmokeTestResult:
        """The prompt as three rows of one batch: base, adapter, base again.

        A head of its own is an effect by itself, and says nothing about the same labels as the base's: then the
        largest of its logits is what it changes.
        """
        self._slots.check(adapter.slot)
        base, changed, again = self._answers([PoolingRow(token_ids, (), use) for use in ((), (adapter,), ())])
        if self._own_width(adapter.slot.index):
            scale = changed.abs().max().item()
            return SmokeTestResult(scale, 0.0, scale)
        return effect(base, changed, again)

    def _answers(self, rows: Sequence[PoolingRow]) -> list[Tensor]:
        """Each row's vector, as long as it is."""
        own = [self._own_width(row.adapters[0].slot.index) if row.adapters else 0 for row in rows]
        labels = None
        if any(own):
            slots = {row.adapters[0].slot.index for row, width in zip(rows, own, strict=True) if width}
            labels = OutputWidths(frozenset(slots), max(self._base_width, *own))
        answers = self._model.answers(tuple(rows), labels).cpu()
        base = self._base_width or answers.shape[1]
        return [answer[: width or base] for answer, width in zip(answers, own, strict=True)]

    @property
    def _base_width(self) -> int:
        """Rows of the base's label layer, trained or not; 0: it has none."""
        pooling = self._model.spec.pooling
        assert pooling is not None
        return self._model.spec.linears[pooling.label_layer].out_features if pooling.label_layer else 0

    def _own_width(self, slot: int) -> int:
        """The number of labels of the slot's own head; 0: the base's."""
        found = (
            change.linear.out_features for change in self._heads.get(slot, ()) if isinstance(change, ReplacedLinear)
        )
        return next(found, 0)


def _pooling_row(row: Row) -> PoolingRow:
    pool = row.pool or PoolingParams()
    return PoolingRow(row.token_ids, pool.token_type_ids, row.adapters, row.is_long, pool.is_unit)


def _output(row: Row, answer: Tensor) -> RowOutput:
    if not torch.isfinite(answer).all():
        error = NumericalError("the model's answer to this request is not made of finite numbers")
        return RowOutput(row.sequence_id, None, error=error)
    return RowOutput(row.sequence_id, None, pooled=answer.numpy().astype("<f4").tobytes())
