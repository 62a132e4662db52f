"""Learns the memory that steps need beside weights and KV: small steps of different shapes, each one's peak measured.

Each probe is large in one feature of the load, and its whole peak is attributed to that feature: an upper bound, as the
peaks of different layers never add up. A margin covers what the allocator rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lora_serve.core.batch import Batch, Row, RowAdapter, RowOutput, SampleInput
from lora_serve.core.memory import ActivationModel, memory_load
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.request import PoolingParams, SamplingParams
from lora_serve.model.system.device_memory import peak_bytes

_MARGIN = 1.1
_CPU_TOKENS, _CUDA_TOKENS = 64, 1024  # of the largest probe
_KEYS = 1024
_LOGIT_ROWS = 16
_DECODE_ROWS = 4
_SAMPLED = SampleInput(SamplingParams(temperature=0.7, top_p=0.9, top_k=8, logprobs=1), 0, 0, ())


@dataclass(frozen=True, slots=True)
class ActivationProbe:
    """`block`: an unused KV block, which every probe row reads and writes over and over."""

    run: Callable[[Batch], list[RowOutput]]
    spec: ModelSpec
    device: torch.device
    block: int
    block_size: int
    max_tokens: int  # of a step

    def learn(self, adapter: RowAdapter | None) -> ActivationModel:
        """Measures with and without `adapter`, one that is in a slot; None: without only."""
        adapters = () if adapter is None else (adapter,)
        most = _CUDA_TOKENS if self.device.type == "cuda" else _CPU_TOKENS
        num_tokens = max(2, min(most, self.max_tokens, self.spec.max_model_len))
        if self.spec.pooling is not None:
            return self._of_pooling(num_tokens, adapters)
        keys = max(2, min(_KEYS, self.spec.max_model_len))
        few = min(num_tokens, max(2, keys // 2))
        self._peak(self._row(0, 1, 1))  # what is allocated once and kept
        fixed = self._peak(self._row(0, 1, 1))
        with_adapter = self._peak(self._row(0, 1, 1, adapters))
        tokens = self._peak(self._row(0, num_tokens, num_tokens, adapters))
        logits = self._peak(*(self._row(i, 1, 1) for i in range(_LOGIT_ROWS)))
        decode = self._peak(*(self._row(i, 1, keys) for i in range(_DECODE_ROWS)))
        chunk = self._peak(self._row(0, 2, keys))
        scores = self._peak(self._row(0, few, keys))
        per_token = (tokens - fixed) / num_tokens
        per_chunk_key = (chunk - fixed) / keys
        explained = fixed + per_token * few + per_chunk_key * keys
        return _with_margin(
            ActivationModel(
                fixed,
                per_token,
                (logits - fixed) / _LOGIT_ROWS,
                with_adapter - fixed,
                (decode - fixed) / (_DECODE_ROWS * keys),
                per_chunk_key,
                (scores - explained) / (few * keys),
            )
        )

    def _of_pooling(self, num_tokens: int, adapters: tuple[RowAdapter, ...]) -> ActivationModel:
        """The model of pooling: a pooled row has all its tokens at once, and reads no cache."""
        one, many = (Row(0, (0,) * n, 0, (), adapters, None, None, pool=PoolingParams()) for n in (1, num_tokens))
        self._peak(one)
        fixed, tokens = self._peak(one), self._peak(many)
        return _with_margin(ActivationModel(fixed, (tokens - fixed) / num_tokens))

    def _row(self, sequence_id: int, count: int, keys: int, adapters: tuple[RowAdapter, ...] = ()) -> Row:
        """A row of the last `count` of `keys` tokens."""
        table = (self.block,) * -(-keys // self.block_size)
        return Row(sequence_id, (0,) * count, keys - count, table, adapters, _SAMPLED, None)

    def _peak(self, *rows: Row) -> int:
        assert memory_load(rows).num_tokens > 0
        return peak_bytes(self.device, lambda: self.run(Batch(rows, (self.block,))))


def _with_margin(model: ActivationModel) -> ActivationModel:
    return ActivationModel(*(max(0.0, _MARGIN * getattr(model, name)) for name in ActivationModel.__dataclass_fields__))
