"""The live view of the mock engine: a step for each token of each request."""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Iterable

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.live import (
    EngineView,
    LiveAdapter,
    LiveCount,
    LiveLimits,
    LiveRequest,
    LiveSettings,
    LiveSlot,
    LiveStep,
    LiveTargets,
    LiveTier,
)
from lora_serve.core.request import InferenceRequest

_MAX_NOTES = 512
STEP_MS = 1.0


class MockView:
    """Notes steps and ends, and shows them."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._steps: deque[LiveStep] = deque(maxlen=_MAX_NOTES)
        self._ended: deque[tuple[int, LiveRequest]] = deque(maxlen=_MAX_NOTES)
        self._mark = 0

    def token(self, request: InferenceRequest, num_output: int) -> None:
        """Notes the step that brought the request's token of that number, from 1 on."""
        row = (request.request_id, "prefill" if num_output == 1 else "decode", 1, 1)
        self._steps.append(LiveStep(self._next(), time.time(), STEP_MS, False, (row,)))

    def ended(self, request: InferenceRequest, num_output: int, reason: str) -> None:
        """Notes the end of a request."""
        self._ended.append((self._next(), _shown(request, num_output, "finished", reason)))

    def look(
        self,
        since: int,
        rows: Iterable[tuple[InferenceRequest, int, bool]],
        held: Iterable[AdapterRef],
        pinned: Iterable[str],
        max_loras: int,
    ) -> EngineView:
        """The present state; `rows`: each request, its tokens so far, and whether it waits."""
        listed, kept = list(rows), set(pinned)
        waiting = Counter(request.tenant for request, _, waits in listed if waits)
        running = Counter(request.tenant for request, _, waits in listed if not waits)
        return EngineView(
            self._mark,
            tuple(step for step in self._steps if step.number > since),
            tuple(_shown(request, count, "waiting" if waits else "running") for request, count, waits in listed),
            tuple(request for number, request in self._ended if number > since),
            queue={tenant: LiveCount(waiting[tenant], running[tenant]) for tenant in {**waiting, **running}},
            slots=tuple(
                LiveSlot(index, ref.name, ref.tenant, ref.digest, ref.num_bytes, 0, ref.digest in kept, ref.version)
                for index, ref in enumerate(held)
            ),
            max_loras=max_loras,
            num_blocks=100,
            num_free_blocks=100 - len(listed),
            settings=LiveSettings(
                LiveLimits(8, 64, 0.0, "no target is set"),
                LiveTargets(None, None),
                8,
                16,
                {"device": LiveTier(0, 0, 0, 0, 0, 0, 0)},
            ),
        )

    def _next(self) -> int:
        self._mark = next(self._numbers)
        return self._mark


def _shown(request: InferenceRequest, num_output: int, state: str, reason: str | None = None) -> LiveRequest:
    return LiveRequest(
        request.request_id,
        request.tenant,
        tuple(LiveAdapter(use.ref.name, use.ref.version, use.ref.digest, use.scale) for use in request.adapters),
        state,
        len(request.prompt_token_ids),
        len(request.prompt_token_ids),
        num_output,
        0,
        request.arrival_time + time.time() - time.monotonic(),
        2.0 if num_output else None,
        reason,
    )
