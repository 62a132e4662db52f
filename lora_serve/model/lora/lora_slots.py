"""The pool of device slots: adapters' weights by slot index, at their true rank. `engine/slots.py` decides
which adapter owns which slot; this file stores bytes and refuses a row whose slot has changed under it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lora_serve.core.batch import SlotRef
from lora_serve.core.errors import InternalError
from lora_serve.core.model_spec import LinearShape
from lora_serve.model.lora.changes import Change
from lora_serve.model.lora.host_adapter import WEIGHT_TYPES, HostAdapter, LinearDelta, SlotColumns, SlotTables

_REMEMBERED = 256  # sets of slots whose modules are known
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
    deltas: tuple[LinearDelta | None, ...]  # by module; none of an arena's copy
    touched: Mapping[torch.dtype, int]  # see `LoraSlots.touched`
    vocab_size: int
    has_changes: bool
    arena: Tensor | None  # uint8, the copy of an adapter's arena to which the tables' addresses lead
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
        targets: Sequence[str] = (),
    ) -> None:
        """`num_slots`: the tables' width at first; a slot beyond it widens them. `stream` None: nothing is copied.
        `first_rank`: a power of two that kernels are launched for from the start, so that lower ones change no graph.
        `targets`: ends of the modules' paths that adapters are expected to touch; none: all modules.
        """
        self.module_index: dict[str, int] = {}
        self.shapes: list[LinearShape] = []  # by module
        self._targets = targets
        self.expected = 0  # the modules that captured steps launch for, a bit each by its number; it only grows
        self.tables = SlotTables.empty(0, num_slots)  # another object after growth: kernels look again
        self.device = device
        self.max_rank = first_rank  # or of any adapter that was ever here, as a power of two
        self._records: SlotRecords | None = None
        self._stream = stream
        self._contents: dict[int, _SlotContent] = {}  # by slot
        self._touched: dict[frozenset[int], dict[torch.dtype, int]] = {}  # by slots, what was asked for lately
        self._changes: dict[str, dict[int, tuple[Change, ...]]] = {}  # module path -> slot
        self.add_modules(linears)

    @property
    def num_slots(self) -> int:
        return self.tables.num_slots

    def add_modules(self, shapes: Mapping[str, LinearShape]) -> None:
        """More modules that deltas can be of; before any adapter is loaded."""
        assert not self._contents
        for path, shape in shapes.items():
            if not self._targets or any(f".{path}".endswith(f".{name}") for name in self._targets):
                self.expected |= 1 << len(self.shapes)
            self.module_index[path] = len(self.shapes)
            self.shapes.append(shape)
        self.tables = SlotTables.empty(len(self.module_index), self.num_slots)
        if self._records is not None:
            self._records.tensor = self._records.tensor.new_zeros(self.num_slots, len(self.module_index), RECORD_WORDS)

    def load(self, slot: SlotRef, adapter: HostAdapter) -> None:
        """Puts `adapter` into the slot in place of its present one. The copy may still be under way on return."""
        assert adapter.digest == slot.digest, "the table and the pool disagree about a digest"
        self._reach(slot.index)
        self.clear(slot.index)
        with nullcontext() if self._stream is None else self._stream.copying() as event:
            columns, arena = self._place(slot.index, adapter)
        has_changes = bool(adapter.changes or adapter.vocab_size)
        deltas = columns.deltas if arena is None else ()
        own = slot, deltas, columns.touched, adapter.vocab_size, has_changes, arena, event
        self._contents[slot.index] = _SlotContent(*own)

    def clear(self, index: int) -> None:
        """Forgets the slot's weights; their bytes are free when nothing else refers to them."""
        if index >= self.tables.num_slots:
            return
        self._contents.pop(index, None)
        self._touched.clear()
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
        if content is None:
            return None
        return content.deltas[module] if content.arena is None else self._in_copy(content.arena, module, slot)

    def touched(self, slots: frozenset[int] | None) -> Mapping[torch.dtype, int]:
        """The modules that adapters in these slots touch, a bit each by its number, by the type of their weights:
        bfloat16 where there is only a gain or a shift. None: the slots of a captured step, with weights of any type.
        """
        if slots is None:
            return dict.fromkeys(WEIGHT_TYPES, self.expected)
        found = self._touched.get(slots)
        if found is None:
            if len(self._touched) >= _REMEMBERED:
                self._touched.clear()
            found = self._touched[slots] = dict.fromkeys(WEIGHT_TYPES, 0)
            for slot in slots & self._contents.keys():
                for dtype, modules in self._contents[slot].touched.items():
                    found[dtype] |= modules
        return found

    def touches(self, modules: int, slots: frozenset[int] | None) -> bool:
        """True if an adapter in one of these slots touches one of the modules, a bit each by its number."""
        return any(own & modules for own in self.touched(slots).values())

    def expect(self, slots: frozenset[int]) -> int:
        """Returns the modules that adapters in these slots touch; captured steps launch for them from now on."""
        modules = functools.reduce(operator.or_, self.touched(slots).values())
        self.expected |= modules
        return modules

    def columns(self, y: Tensor, modules: Sequence[int]) -> Sequence[Tensor]:
        """The columns of y [tokens, sum of out] that are each module's outputs, as views."""
        sizes = [self.shapes[module].out_features for module in modules]
        return torch.split(y, sizes, dim=1) if len(sizes) > 1 else (y,)

    def device_records(self) -> SlotRecords:
        """The tables on the device, made at the first call and kept up to date from then on."""
        if self._records is None:
            self._records = SlotRecords(self.tables.num_slots, len(self.module_index), self.device)
            for slot in self._contents:
                self._records.write(slot, SlotTables(*(table[:, slot] for table in self.tables)))
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

    def _place(self, index: int, adapter: HostAdapter) -> tuple[SlotColumns, Tensor | None]:
        columns, arena = self._columns(adapter)
        rank = int(columns.tables.rank.max())
        self.max_rank = max(self.max_rank, 1 << (rank - 1).bit_length() if rank else 0)
        self.tables.set(index, columns.tables)
        if self._records is not None:
            self._records.write(index, columns.tables)
        for path, changes in adapter.changes.items():
            self._changes.setdefault(path, {})[index] = tuple(change.to(self.device) for change in changes)
        return columns, arena

    def _columns(self, adapter: HostAdapter) -> tuple[SlotColumns, Tensor | None]:
        """The adapter's columns on the CPU; those of its copy on a GPU, and the copy, if it is one of its arena."""
        columns, arena = adapter.columns, adapter.arena if self._stream is not None else None
        is_moved = self._stream is not None and arena is None  # each tensor by itself
        if columns is None or len(columns.deltas) != len(self.module_index) or is_moved:
            unknown = adapter.deltas.keys() - self.module_index.keys()
            assert not unknown, f"no linear layers of this model: {sorted(unknown)}"
            deltas = [adapter.deltas.get(path) for path in self.module_index]
            columns = SlotColumns.of([d if d is None or arena is not None else d.to(self.device) for d in deltas])
        if arena is None:
            return columns, None
        moved = arena.to(self.device, non_blocking=True, copy=True)
        return replace(columns, tables=columns.tables.moved(moved.data_ptr() - arena.data_ptr())), moved

    def _in_copy(self, arena: Tensor, module: int, slot: int) -> LinearDelta | None:
        """The delta of a linear layer that the tables lead to, as views of the copy."""
        shape = self.shapes[module]
        a, b, gain, shift, rank, scale, is_bfloat16 = (table[module, slot].item() for table in self.tables)
        dtype = WEIGHT_TYPES[0 if is_bfloat16 else 1]

        def view(address: Any, dtype: torch.dtype, *size: Any) -> Tensor | None:
            memory = arena[address - arena.data_ptr() :] if address else None
            return None if memory is None else memory[: math.prod(size) * dtype.itemsize].view(dtype).view(size)

        low_rank = view(a, dtype, rank, shape.in_features), view(b, dtype, rank, shape.out_features)
        vectors = (view(one, torch.float32, shape.out_features) for one in (gain, shift))
        return LinearDelta(*low_rank, float(scale), *vectors) if a or gain or shift else None
