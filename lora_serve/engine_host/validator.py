"""Looks at an adapter's values beside the model, and keeps what it made ready for the load that follows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lora_serve.adapters.checkpoint.weights.plain_lora import Undo
from lora_serve.adapters.checkpoint.weights.saved import SavedAdapter
from lora_serve.adapters.registration.validation import convert, validate
from lora_serve.adapters.registration.verification import StagedAdapter
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.messages import AdapterSize
from lora_serve.model.lora.host_adapter import HostAdapter
from lora_serve.model.system.device_memory import is_out_of_memory


class LocalValidator:
    """See `WeightsValidator`; with the model of this process."""

    def __init__(
        self, fold: Callable[[SavedAdapter], HostAdapter], undo: Undo, at_hand: AdaptersAtHand | None = None
    ) -> None:
        """`at_hand`: where the loader finds what was folded already; None: it reads the files again."""
        self._fold = fold
        self._undo = undo
        self._at_hand = at_hand or AdaptersAtHand()

    def convert(self, staged: StagedAdapter) -> None:
        """See `AdapterVerifier.convert`."""
        with _errors_of_memory():
            convert(staged, self._undo)

    def validate(self, staged: StagedAdapter, *, allow_noop: bool) -> AdapterSize:
        """See `AdapterVerifier.validate`."""
        with _errors_of_memory():
            return validate(staged, self.num_bytes, allow_noop=allow_noop)

    def num_bytes(self, saved: SavedAdapter) -> int:
        """Host memory that it takes, folded; it is at hand from now on."""
        folded = self._fold(saved)
        self._at_hand.put(folded)
        return folded.num_bytes

    def forget(self) -> None:
        """See `WeightsValidator.forget`."""
        self._at_hand.clear()


class AdaptersAtHand:
    """An adapter that is being registered, as it was folded from the very files whose digest it bears.

    One at most, of those that are registered at once the last: put by a registry's thread, taken by a loader's. What
    is not here any more is read again.
    """

    def __init__(self) -> None:
        self._adapters: dict[str, HostAdapter] = {}

    def put(self, adapter: HostAdapter) -> None:
        """In place of any other. Left out: what a load would make differently, of the rank that a card names."""
        self._adapters = {adapter.digest: adapter} if adapter.is_plain else {}

    def take(self, adapter: AdapterRef) -> HostAdapter | None:
        """It is gone afterwards: whoever took it holds its memory alone."""
        found = self._adapters.pop(adapter.digest, None)
        return None if found is None else dataclasses.replace(found, name=adapter.name)

    def clear(self) -> None:
        self._adapters = {}


@contextmanager
def _errors_of_memory() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise AdapterUnavailableError("There is no memory at present to take an adapter in; try again.") from None
