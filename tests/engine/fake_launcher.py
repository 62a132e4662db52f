"""A device that computes what was launched when its results are asked for, in order, and as late as that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from lora_serve.core.batch import Batch, BlockMoves, Row, RowAdapter, RowOutput, SlotRef
from lora_serve.core.messages import SmokeTestResult
from tests.engine.fake_runner import FakeRunner


@dataclass
class OrderedDevice(FakeRunner):
    """Nothing but another launch may come behind a launch before its results are taken in."""

    under_way: list[FakeFlight] = field(default_factory=list)

    def _is_quiet(self) -> None:
        assert not self.under_way, "the device is still at work"

    def load_slot(self, slot: SlotRef, adapter: str) -> None:
        self._is_quiet()
        super().load_slot(slot, adapter)

    def clear_slot(self, index: int) -> None:
        self._is_quiet()
        super().clear_slot(index)

    def run(self, batch: Batch) -> list[RowOutput]:
        self._is_quiet()
        return super().run(batch)

    def move_blocks(self, moves: BlockMoves) -> None:
        self._is_quiet()
        super().move_blocks(moves)

    def smoke_test(self, adapter: RowAdapter, token_ids: tuple[int, ...]) -> SmokeTestResult:
        self._is_quiet()
        return super().smoke_test(adapter, token_ids)


@dataclass(eq=False)
class FakeFlight:
    device: OrderedDevice
    batch: Batch
    before: FakeFlight | None
    is_wide: Callable[[Row], bool]
    outputs: dict[int, RowOutput | None] = field(default_factory=dict)

    def collect(self) -> list[RowOutput | None]:
        assert self.device.under_way.pop(0) is self, "results come in the order of the launches"
        rows = tuple(self._fed(row) for row in self.batch.rows)
        run = tuple(row for row in rows if not self._is_in_vain(row))
        found = FakeRunner.run(self.device, replace(self.batch, rows=run))
        self.outputs = dict.fromkeys((row.sequence_id for row in rows), None)
        self.outputs |= {output.sequence_id: output for output in found}
        for row in rows:
            if self._is_in_vain(row) or self.is_wide(row):
                self._spoil(row)
        garbage = {row.sequence_id: RowOutput(row.sequence_id, 1) for row in rows if self._is_in_vain(row)}
        return [garbage.get(row.sequence_id, self.outputs[row.sequence_id]) for row in rows]

    def _is_in_vain(self, row: Row) -> bool:
        """True if it was fed a token that was not drawn."""
        return self.before is not None and self.before.outputs.get(row.sequence_id, row) is None

    def _spoil(self, row: Row) -> None:
        """The row has to run again: what it wrote may not be read, but be written again."""
        self.outputs[row.sequence_id] = None
        for position in range(row.start, row.start + len(row.token_ids)):
            for kind in range(len(self.device.windows)):
                place = self.device.place(row, position, kind)
                self.device.cache[place] = (0, "")
                self.device.rejected.add(place)

    def _fed(self, row: Row) -> Row:
        if not row.is_fed:
            return row
        assert row.token_ids == (0,)
        assert self.before is not None
        output = self.before.outputs[row.sequence_id]
        token = 1 if output is None or output.token_id is None else output.token_id
        return replace(row, token_ids=(token,), is_fed=False)


@dataclass(eq=False)
class FakeLauncher:
    """Implements `engine.Launcher` over the device that a `World` gives it."""

    is_wide: Callable[[Row], bool] = lambda row: False
    refuses: Callable[[Batch], bool] = lambda batch: False
    device: OrderedDevice | None = None
    num_launched: int = 0
    num_behind: int = 0  # behind another that was under way

    def launch(self, batch: Batch, before: FakeFlight | None) -> FakeFlight | None:
        assert self.device is not None
        assert all(row.is_plain for row in batch.rows)
        assert not batch.moves or before is None
        if self.refuses(batch):
            return None
        flight = FakeFlight(self.device, batch, before, self.is_wide)
        assert self.device.under_way == ([] if before is None else [before])
        self.device.under_way.append(flight)
        self.num_launched += 1
        self.num_behind += before is not None
        return flight
