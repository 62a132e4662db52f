"""Notes of what the engine does, for a live view. Nothing is noted unless it is watched, or was within some seconds.

Every note has a number, and each viewer says up to which one it has seen: several gateways may watch one engine.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import TypeVar

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.batch import Batch, Row
from lora_serve.core.live import LiveAdapter, LiveMove, LiveRequest, LiveStep
from lora_serve.core.messages import Event, FinishEvent, StepEvent, TokenEvent
from lora_serve.engine.sequence import Sequence

WATCHED_SECONDS = 3.0  # after a view
MAX_NOTES = 512  # of each kind
_IDLE_SECONDS = 0.02  # without a step
_MAX_NAMES = 4096
_Note = TypeVar("_Note")


class Recorder:
    """On the engine's thread. A step is noted by callers that asked first whether it `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self._wall = time.time
        self._ends_at = 0.0
        self.offset = 0.0  # seconds from the engine's clock to Unix time, as they were at the last view
        self._last_step = 0.0
        self.mark = 0  # the number of the last note
        self._steps: deque[tuple[int, LiveStep]] = deque(maxlen=MAX_NOTES)
        self._ended: deque[tuple[int, LiveRequest]] = deque(maxlen=MAX_NOTES)
        self._moves: deque[tuple[int, tuple[str, str, str, float]]] = deque(maxlen=MAX_NOTES)
        self._names: dict[str, tuple[str, str]] = {}  # (name, owner) of adapters by digest, as far as they were met

    def watched(self, now: float) -> None:
        """Takes in that a view is asked for: from here on everything is noted for some seconds."""
        if not self.is_on:
            self.is_on, self._last_step = True, now
        self._ends_at = now + WATCHED_SECONDS
        self.offset = self._wall() - now

    def step(
        self,
        number: int,
        batch: Batch,
        sequences: Mapping[int, Sequence],
        events: Items[StepEvent],
        start: float,
        now: float,
    ) -> None:
        """Notes a step that ran from `start` to `now`; `sequences`: of its rows."""
        if start > self._ends_at:  # not `now`: a step may be longer than that
            self._stop()
            return
        num_tokens = Counter(event.request_id for event in events if type(event) is TokenEvent)
        rows = []
        for row in batch.rows:
            sequence = sequences[row.sequence_id]
            request_id = sequence.request.request_id
            rows.append((request_id, _kind(row, sequence), len(row.token_ids), num_tokens[request_id]))
        is_gap = start - self._last_step > _IDLE_SECONDS
        self._last_step = now
        ms = round(1000 * (now - start), 3)
        self._steps.append((self._next(), LiveStep(number, now + self.offset, ms, is_gap, tuple(rows))))

    def ended(self, sequence: Sequence, end: Event | None) -> None:
        """Notes the end of a request, if it is on; `end` None: its client left."""
        if not self.is_on:
            return
        self._ended.append((self._next(), self.request(sequence, "finished", _reason(end))))

    def moved(self, digest: str, source: str, to: str, seconds: float = 0.0, adapter: AdapterRef | None = None) -> None:
        """Notes, if it is on, that an adapter came to a tier, or left one."""
        if not self.is_on:
            return
        if adapter is not None:
            self.met(adapter)
        self._moves.append((self._next(), (digest, source, to, round(1000 * seconds, 3))))

    def met(self, adapter: AdapterRef) -> None:
        """Learns the name that belongs to a digest."""
        if len(self._names) > _MAX_NAMES:
            self._names.clear()
        self._names[adapter.digest] = adapter.name, adapter.tenant

    def request(self, sequence: Sequence, state: str, reason: str | None = None) -> LiveRequest:
        """A request as it is now."""
        request, first = sequence.request, sequence.first_token_at
        for use in sequence.adapters:
            self.met(use.ref)
        return LiveRequest(
            request.request_id,
            request.tenant,
            tuple(LiveAdapter(use.ref.name, use.ref.version, use.ref.digest, use.scale) for use in sequence.adapters),
            state,
            sequence.num_prompt,
            sequence.num_computed,
            sequence.num_output,
            sequence.num_cached,
            round(request.arrival_time + self.offset, 3),
            None if first is None else round(1000 * (first - request.arrival_time), 3),
            reason,
        )

    def notes(self, since: int) -> tuple[tuple[LiveStep, ...], tuple[LiveRequest, ...], tuple[LiveMove, ...]]:
        """The steps, the requests that ended, and the adapters' moves after that number."""
        moves = (
            LiveMove(digest, *self._names.get(digest, ("", "")), source, to, ms)
            for digest, source, to, ms in _after(self._moves, since)
        )
        return _after(self._steps, since), _after(self._ended, since), tuple(moves)

    def _next(self) -> int:
        self.mark += 1
        return self.mark

    def _stop(self) -> None:
        self.is_on = False
        for notes in (self._steps, self._ended, self._moves):
            notes.clear()
        self._names.clear()


def _kind(row: Row, sequence: Sequence) -> str:
    if row.pool is not None:
        return "pool"
    if row.num_draft:
        return "draft"
    return "decode" if row.start >= sequence.num_prompt else "prefill"


def _reason(end: Event | None) -> str:
    if end is None:
        return "abort"
    return end.reason.value if isinstance(end, FinishEvent) else "error"


def _after(notes: deque[tuple[int, _Note]], since: int) -> tuple[_Note, ...]:
    """The notes above that number, in order; all of them if none has it: they are another engine's."""
    found = list(itertools.takewhile(lambda note: note[0] > since, reversed(notes)))
    return tuple(note for _, note in reversed(found))
