"""The model that pools with its linear layers replaced, and the proof that it still is the plain one."""

from __future__ import annotations

from torch import Tensor

from lora_serve.core.config import ModelConfig
from lora_serve.core.errors import ModelError
from lora_serve.model.lora.adapted_model import AdaptedModel
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.pooling.exactness import is_exact
from lora_serve.model.pooling.loading import PoolingParts
from lora_serve.model.pooling.step import OwnLabels, PoolingRow, PoolingStep


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

    def answers(self, rows: tuple[PoolingRow, ...], own_labels: OwnLabels | None = None) -> Tensor:
        """[num_rows, dimension or width] float32; `own_labels`: if rows have label layers of their own."""
        return self._forward(self._layout.step(rows, own_labels))
