"""The device memory that a step needs, and how much there is. Plain numbers; nothing is measured here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from lora_serve.core.batch import Row


@dataclass(frozen=True, slots=True)
class MemoryLoad:
    """The numbers that decide the size of a step's activations. A row of one token decodes, a longer one is a chunk of
    a prompt.

    Decoding rows are padded to the longest of them, chunks are attended to one after the other.
    """

    num_tokens: int = 0
    num_logits: int = 0  # positions whose logits are wanted
    num_adapters: int = 0  # distinct
    num_decode_rows: int = 0
    longest_decode: int = 0  # keys of the longest decoding row
    longest_chunk: int = 0  # keys of the longest chunk, its own tokens included
    num_scores: int = 0  # tokens * keys of the largest chunk

    @property
    def num_decode_keys(self) -> int:
        return self.num_decode_rows * self.longest_decode

    def plus(self, start: int, count: int, num_logits: int) -> MemoryLoad:
        """The load with one more row of `count` tokens at positions start, start + 1, ..."""
        load = replace(self, num_tokens=self.num_tokens + count, num_logits=self.num_logits + num_logits)
        keys = start + count
        if count == 1:
            longest = max(self.longest_decode, keys)
            return replace(load, num_decode_rows=self.num_decode_rows + 1, longest_decode=longest)
        scores = max(self.num_scores, count * keys)
        return replace(load, longest_chunk=max(self.longest_chunk, keys), num_scores=scores)


def memory_load(rows: Iterable[Row]) -> MemoryLoad:
    """The load of these rows in one step."""
    load, digests = MemoryLoad(), set[str]()
    for row in rows:
        digests.update(adapter.slot.digest for adapter in row.adapters)
        num_logits = len(row.prompt_targets) if row.prompt_targets else row.num_sampled
        load = load.plus(row.start, len(row.token_ids), num_logits)
    return replace(load, num_adapters=len(digests))


@dataclass(frozen=True, slots=True)
class ActivationModel:
    """Bytes of activations at the peak of a step, linear in its load. All zero: not known."""

    fixed: float = 0.0
    per_token: float = 0.0
    per_logit: float = 0.0
    per_adapter: float = 0.0
    per_decode_key: float = 0.0
    per_chunk_key: float = 0.0
    per_score: float = 0.0

    def num_bytes(self, load: MemoryLoad) -> int:
        return int(
            self.fixed
            + self.per_token * load.num_tokens
            + self.per_logit * load.num_logits
            + self.per_adapter * load.num_adapters
            + self.per_decode_key * load.num_decode_keys
            + self.per_chunk_key * load.longest_chunk
            + self.per_score * load.num_scores
        )


def _nothing() -> int:
    return 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The shares of the device's memory, decided at start. The default knows nothing and allows everything."""

    limit: int | None = None  # bytes for all that is ours; None: not known
    weight_bytes: int = 0
    kv_bytes: int = 0
    adapter_bytes: int | None = None  # of device slots at most; None: no limit but --max-loras
    activations: ActivationModel = field(default_factory=ActivationModel)
    num_host_blocks: int = 0  # KV blocks that host memory has room for
    block_copy_seconds: float = 0.0  # of one KV block to host memory or back, measured at start
    measured_peak: Callable[[], int] = _nothing  # bytes in use at most since start; 0: not measured
