"""Checks an adapter's values against the model of this process, and keeps the folded adapter for the next load."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lora_serve.adapters.checkpoint.weights.plain_lora import Undo
from lora_serve.adapters.checkpoint.weights.saved import SavedAdapter
from lora_serve.adapters.registration.validation import convert, validate
from lora_serve.adapters.registration.verification import StagedAdapter
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import AdapterUnavailableError, is_out_of_memory
from lora_serve.core.messages import AdapterSize
from lora_serve.model.lora.host_adapter import HostAdapter

KEPT_BYTES = 2**26  # of adapters that wait for their smoke tests, besides the last


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
            if (left := left - other.num_bytes) < 0 or digest == adapter.digest:
                self._adapters.pop(digest, None)
        if adapter.is_plain:
            self._adapters[adapter.digest] = adapter

    def take(self, adapter: AdapterRef) -> HostAdapter | None:
        """Gives the folded adapter away, so that the caller alone holds its memory."""
        found = self._adapters.pop(adapter.digest, None)
        return None if found is None else dataclasses.replace(found, name=adapter.name)

    def forget(self, digest: str) -> None:
        self._adapters.pop(digest, None)


@dataclasses.dataclass(frozen=True)
class LocalValidator:
    """See `WeightsValidator`; with the model of this process. `_last_folded` is where the loader looks first."""

    _fold: Callable[[SavedAdapter], HostAdapter]
    _undo: Undo
    _last_folded: LastFolded = dataclasses.field(default_factory=LastFolded)

    def convert(self, staged: StagedAdapter) -> None:
        """See `AdapterVerifier.convert`."""
        with _errors_of_memory():
            convert(staged, self._undo)

    def validate(self, staged: StagedAdapter, *, allow_noop: bool) -> AdapterSize:
        """See `AdapterVerifier.validate`."""
        with _errors_of_memory():
            return validate(staged, self.num_bytes, allow_noop=allow_noop)

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
