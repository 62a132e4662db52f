"""Validation of an adapter's values: the part of a registration that needs torch, run beside the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lora_serve.adapters.checkpoint.artifact import Artifact
from lora_serve.adapters.checkpoint.bound import BoundAdapter
from lora_serve.adapters.checkpoint.saved import SavedAdapter
from lora_serve.adapters.checkpoint.weights import (
    Undo,
    WeightsFile,
    bits_of,
    convert_to_plain_lora,
    open_weights,
    read_weights,
)
from lora_serve.adapters.registration.verification import StagedAdapter
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import AdapterUnavailableError, InvalidAdapterError, is_out_of_memory
from lora_serve.core.messages import AdapterSize
from lora_serve.model.lora.host_adapter import HostAdapter

_ALL_BUT_SIGN = {2: 0x7FFF, 4: 0x7FFFFFFF}  # by bytes
_EXPONENTS = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000}
KEPT_BYTES = 2**26  # of adapters that wait for their smoke tests, besides the last


def check_values(
    folder: Path, artifact: Artifact, allow_noop: bool = False, check: Callable[[], None] = lambda: None
) -> None:
    """Refuses values that are not finite, copies that differ and, unless `allow_noop`, deltas that are all zero.

    The effect on the model's answers is the smoke test's part. `check`: called at every tensor. Raises
    InvalidAdapterError naming the tensors, OSError, what `check` raises.
    """
    file = open_weights(folder, check)
    reasons = [f"tensor {name!r} holds NaN or infinity" for name in artifact.tensors if not _is_finite(file, name)]
    reasons += [
        f"tensors {first!r} and {second!r} are one and the same to PEFT, but they differ"
        for first, second in artifact.bound.copies
        if not torch.equal(file.get_tensor(first), file.get_tensor(second))
    ]
    if not reasons and not allow_noop and _is_noop(file, artifact.bound):
        reasons.append("it changes nothing: in every module lora_A, lora_B or the scale is zero")
    if reasons:
        raise InvalidAdapterError(reasons)


def _is_finite(file: WeightsFile, name: str) -> bool:
    tensor = file.get_tensor(name)
    if tensor.numel() == 0:
        return True
    mask = _EXPONENTS[tensor.dtype]
    return bool((bits_of(tensor) & mask).max() < mask)  # NaN and infinity have every bit of the exponent set


def _is_noop(file: WeightsFile, bound: BoundAdapter) -> bool:
    """True if all low-rank deltas are zero; False for adapters with anything else, which the smoke test judges."""
    if (
        not bound.is_additive
        or bound.conversions is not None
        or any(linear.lora_bias_name for linear in bound.linears.values())
    ):
        return False
    factors = [(linear.a_name, linear.b_name, linear.scale) for linear in bound.linears.values()]
    factors += [(table.a_name, table.b_name, table.scale) for table in bound.embeddings.values()]
    return all(
        scale == 0.0 or any(name is None or is_zero(file.get_tensor(name)) for name in (a, b))
        for a, b, scale in factors
    )


def is_zero(tensor: Tensor) -> bool:
    """True if every value is zero, of either sign."""
    return not (bits_of(tensor) & _ALL_BUT_SIGN[tensor.itemsize]).any()


def validated(staged: StagedAdapter, *, allow_noop: bool) -> SavedAdapter:
    """The adapter's tensors, once every value is found right. Raises InvalidAdapterError, OSError."""
    check = staged.budget.check
    check_values(staged.folder, staged.artifact, allow_noop, check)
    return read_weights(staged.folder, staged.artifact, max_rank=staged.max_rank, check=check)


def convert(staged: StagedAdapter, undo: Undo) -> None:
    """See `AdapterVerifier.convert`. A no-op is allowed here, as only the converted adapter shows it."""
    check = staged.budget.check
    check_values(staged.folder, staged.artifact, allow_noop=True, check=check)
    convert_to_plain_lora(staged.folder, staged.artifact, undo, check)


class LastFolded:
    """The last adapters that registrations folded, from the very files whose digests they bear.

    Put by the registry's threads, taken by a loader's. An adapter that is not here any more is read again.
    """

    def __init__(self) -> None:
        self._adapters: dict[str, HostAdapter] = {}  # by digest, the latest last

    def put(self, adapter: HostAdapter) -> None:
        """Drops the oldest beyond a limit; keeps none that a load would fold differently, for its base or its rank."""
        left = KEPT_BYTES
        for digest, other in reversed(list(self._adapters.items())):  # each change is one call: others come between
            if (left := left - other.num_bytes - other.extra_bytes) < 0 or digest == adapter.digest:
                self._adapters.pop(digest, None)
        if adapter.is_plain:
            self._adapters[adapter.digest] = adapter

    def take(self, adapter: AdapterRef) -> HostAdapter | None:
        """Gives the folded adapter away, so that the caller alone holds its memory."""
        return self._adapters.pop(adapter.digest, None)

    def forget(self, digest: str) -> None:
        self._adapters.pop(digest, None)


@dataclass(frozen=True)
class LocalValidator:
    """See `WeightsValidator`; with the model of this process. `_last_folded` is where the loader looks first."""

    _fold: Callable[[SavedAdapter], HostAdapter]
    _undo: Undo
    _last_folded: LastFolded = field(default_factory=LastFolded)

    def convert(self, staged: StagedAdapter) -> None:
        """See `AdapterVerifier.convert`."""
        with _errors_of_memory():
            convert(staged, self._undo)

    def validate(self, staged: StagedAdapter, *, allow_noop: bool) -> AdapterSize:
        """See `AdapterVerifier.validate`."""
        with _errors_of_memory():
            saved = validated(staged, allow_noop=allow_noop)
            size = AdapterSize(saved.rank, self.num_bytes(saved))
            staged.budget.check()
            return size

    def num_bytes(self, saved: SavedAdapter) -> int:
        """The host memory that the adapter takes, folded. The folded adapter is kept for the next load."""
        folded = self._fold(saved)
        self._last_folded.put(folded)
        return folded.num_bytes

    def forget(self, digest: str) -> None:
        """See `WeightsValidator.forget`."""
        self._last_folded.forget(digest)


@contextmanager
def _errors_of_memory() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise AdapterUnavailableError("There is no memory at present to take an adapter in; try again.") from None
