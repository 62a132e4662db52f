"""The pool of device slots: adapters' weights by slot index, at their true rank. `engine/slots.py` decides
which adapter owns which slot; this file stores bytes and refuses a row whose slot has changed under it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lora_serve.core.batch import SlotRef
from lora_serve.core.errors import InternalError
from lora_serve.core.model_spec import LinearShape
from lora_serve.model.lora.changes import Change
from lora_serve.model.lora.host_adapter import HostAdapter, LinearDelta, SlotColumns, SlotTables, moved_deltas

RECORD_WORDS = 8  # a, b, gain, shift: addresses; rank; scale: float32's bits; 1 if a and b are bfloat16; 0


class CopyStream:
    """The CUDA stream on which adapters are copied beside the computation; the computation waits for a copy's event.

    A copy comes after all computation that was enqueued before it: memory of a slot that was cleared may be given out
    again for the copy while a kernel that still reads it is under way. Tests without a GPU use a stream of
    their own in its place.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def copying(self) -> Iterator[Any]:
        """Copies enqueued within run beside the computation. Yields the event of their end, set when the block ends."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield event
            event.record(self._stream)

    def wait(self, event: Any) -> None:
        """Makes later computation wait for the event; the calling thread itself does not wait."""
        torch.cuda.current_stream(self._device).wait_event(event)


def copy_stream(device: torch.device) -> CopyStream | None:
    """The device's copy stream; None on the CPU, where nothing is copied."""
    return CopyStream(device) if device.type == "cuda" else None


class SlotRecords:
    """The slots' tables on the device, [num_slots, num_modules, RECORD_WORDS] int64: 64 bytes per slot and linear
    layer.

    A slot's new content is one copy that joins the queue of the stream it is made on; the memory stays in place, so
    that captured graphs go on reading it. Only growth moves it, and then `tensor` is another object.
    """

    def __init__(self, num_slots: int, num_modules: int, device: torch.device) -> None:
        self.tensor = torch.zeros(num_slots, num_modules, RECORD_WORDS, dtype=torch.int64, device=device)

    def write(self, slot: int, columns: SlotTables) -> None:
        """`columns`: of tensors on this device."""
        words = torch.zeros(len(columns.a), RECORD_WORDS, dtype=torch.int64)
        for word, column in enumerate(columns):
            words[:, word] = column.view(torch.int32) if column is columns.scale else column
        self.tensor[slot].copy_(words.pin_memory() if self.tensor.is_cuda else words, non_blocking=True)

    def clear(self, slot: int) -> None:
        self.tensor[slot].zero_()

    def widen(self, num_slots: int) -> None:
        wide = self.tensor.new_zeros(num_slots, *self.tensor.shape[1:])
        wide[: len(self.tensor)] = self.tensor
        self.tensor = wide


@dataclass(slots=True)
class _SlotContent:
    owner: SlotRef
    deltas: tuple[LinearDelta | None, ...]  # by module
    vocab_size: int
    has_changes: bool
    copied: Any = None  # the event of a copy that no row has waited for yet


class LoraSlots:
    """The slots, each the effect of its adapter on every linear layer; as many as were ever loaded at once.

    On the CPU a slot refers to the host tensors (device and host memory are the same bytes); on a GPU it copies them,
    on a stream of its own, and the computation waits for a copy only where a row uses the slot (see `check`).
    """

    def __init__(
        self,
        linears: Mapping[str, LinearShape],
        num_slots: int,
        device: torch.device,
        stream: CopyStream | None = None,
        first_rank: int = 0,
    ) -> None:
        """`num_slots`: the tables' width at first; a slot beyond it widens them. `stream` None: nothing is copied.
        `first_rank`: a power of two that kernels are launched for from the start, so that lower ones change no graph.
        """
        self.module_index = {name: index for index, name in enumerate(linears)}
        self.out_features = tuple(shape.out_features for shape in linears.values())  # by module
        self.tables = SlotTables.empty(len(linears), num_slots)  # another object after growth: kernels look again
        self.device = device
        self.max_rank = first_rank  # or of any adapter that was ever here, as a power of two
        self.types = {torch.bfloat16}  # and those of the weights of any adapter that was ever here
        self._records: SlotRecords | None = None
        self._stream = stream
        self._contents: dict[int, _SlotContent] = {}  # by slot
        self._changes: dict[str, dict[int, tuple[Change, ...]]] = {}  # module path -> slot

    @property
    def num_slots(self) -> int:
        return self.tables.num_slots

    def add_modules(self, shapes: Mapping[str, LinearShape]) -> None:
        """More modules that deltas can be of; before any adapter is loaded."""
        assert not self._contents
        self.module_index |= {path: index for index, path in enumerate(shapes, len(self.module_index))}
        self.out_features += tuple(shape.out_features for shape in shapes.values())
        self.tables = SlotTables.empty(len(self.module_index), self.num_slots)
        if self._records is not None:
            self._records.tensor = self._records.tensor.new_zeros(self.num_slots, len(self.module_index), RECORD_WORDS)

    def load(self, slot: SlotRef, adapter: HostAdapter) -> None:
        """Puts `adapter` into the slot in place of its present one. The copy may still be under way on return."""
        assert adapter.digest == slot.digest, "the table and the pool disagree about a digest"
        self._reach(slot.index)
        self.clear(slot.index)
        with nullcontext() if self._stream is None else self._stream.copying() as event:
            deltas = self._place(slot.index, adapter)
        has_changes = bool(adapter.changes or adapter.vocab_size)
        self._contents[slot.index] = _SlotContent(slot, deltas, adapter.vocab_size, has_changes, event)

    def clear(self, index: int) -> None:
        """Forgets the slot's weights; their bytes are free when nothing else refers to them."""
        if index >= self.tables.num_slots:
            return
        self._contents.pop(index, None)
        self.tables.clear(index)
        if self._records is not None:
            self._records.clear(index)
        for table in self._changes.values():
            table.pop(index, None)

    def check(self, slot: SlotRef) -> None:
        """Raises InternalError unless the slot still holds exactly this digest in this generation.

        Work enqueued after a check comes after the slot's copy.
        """
        content = self._contents.get(slot.index)
        if content is None or content.owner != slot:
            raise InternalError(
                f"adapter slot {slot.index} no longer holds {slot.digest} of generation {slot.generation}"
            )
        self._wait(content)

    def delta(self, module: int, slot: int) -> LinearDelta | None:
        """The slot's delta of a linear layer, None if it does not adapt it."""
        content = self._contents.get(slot)
        return None if content is None else content.deltas[module]

    def columns(self, y: Tensor, modules: Sequence[int]) -> Sequence[Tensor]:
        """The columns of y [tokens, sum of out] that are each module's outputs, as views."""
        return torch.split(y, [self.out_features[module] for module in modules], dim=1) if len(modules) > 1 else (y,)

    def device_records(self) -> SlotRecords:
        """The tables on the device, made at the first call and kept up to date from then on."""
        if self._records is None:
            self._records = SlotRecords(self.tables.num_slots, len(self.module_index), self.device)
            for slot, content in self._contents.items():
                self._records.write(slot, SlotColumns.of(content.deltas).tables)
        return self._records

    def has_changes(self, slot: int) -> bool:
        """True if the slot's adapter does more than `LinearDelta`s: changes of modules, or a vocabulary of its own."""
        return slot in self._contents and self._contents[slot].has_changes

    def vocab_size(self, slot: int) -> int:
        """The number of tokens that the slot's adapter knows; 0: those of the base model."""
        return self._contents[slot].vocab_size if slot in self._contents else 0

    def changes_of(self, path: str) -> Mapping[int, tuple[Change, ...]]:
        """The changes of a module by slot: a table that stays the same object and is kept up to date."""
        return self._changes.setdefault(path, {})

    def _reach(self, index: int) -> None:
        """Makes the tables wide enough for a slot, at least twice as wide as before if they are not."""
        if index < self.tables.num_slots:
            return
        num_slots = max(index + 1, 2 * self.tables.num_slots)
        self.tables = self.tables.widened(num_slots)
        if self._records is not None:
            for content in self._contents.values():  # copies under way write into the memory that is left behind
                self._wait(content)
            self._records.widen(num_slots)

    def _wait(self, content: _SlotContent) -> None:
        if self._stream is not None and content.copied is not None:
            self._stream.wait(content.copied)
            content.copied = None

    def _place(self, index: int, adapter: HostAdapter) -> tuple[LinearDelta | None, ...]:
        columns = self._columns(adapter)
        rank = int(columns.tables.rank.max())
        self.max_rank = max(self.max_rank, 1 << (rank - 1).bit_length() if rank else 0)
        self.types |= {delta.a.dtype for delta in columns.deltas if delta is not None and delta.a is not None}
        self.tables.set(index, columns.tables)
        if self._records is not None:
            self._records.write(index, columns.tables)
        for path, changes in adapter.changes.items():
            self._changes.setdefault(path, {})[index] = tuple(change.to(self.device) for change in changes)
        return columns.deltas

    def _columns(self, adapter: HostAdapter) -> SlotColumns:
        """The adapter's columns on the CPU; those of its copy on a GPU."""
        columns = adapter.columns
        if self._stream is None and columns is not None and len(columns.deltas) == len(self.module_index):
            return columns
        unknown = adapter.deltas.keys() - self.module_index.keys()
        assert not unknown, f"no linear layers of this model: {sorted(unknown)}"
        host = [adapter.deltas.get(path) for path in self.module_index]
        if self._stream is not None and adapter.arena is not None:
            return SlotColumns.of(moved_deltas(host, adapter.arena, self.device))
        return SlotColumns.of([None if delta is None else delta.to(self.device) for delta in host])
