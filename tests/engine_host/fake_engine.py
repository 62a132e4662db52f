"""An engine's process without a model: the real service over the fake runner. Started with a socket's number.

What a request's prompt holds decides what becomes of the process: see the constants.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lora_serve.adapters.registration.verification import StagedAdapter
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.batch import Batch, RowOutput
from lora_serve.core.config import AdapterConfig, EngineConfig
from lora_serve.core.errors import AdapterUnavailableError, ModelError
from lora_serve.core.messages import AdapterSize, Configure, LoadRefused, Ready, ToEngine
from lora_serve.engine.engine import Engine, build_engine
from lora_serve.engine.loader import LoadFinished
from lora_serve.engine.loop import Mail
from lora_serve.engine_host.child import open_channel, run
from lora_serve.engine_host.service import EngineService
from tests.engine.fake_runner import FakeRunner
from tests.engine.world import World

SLOW, CRASH, HANG, EXIT, BUG, FATAL, UNSPEAKABLE = 701, 702, 703, 704, 705, 706, 707  # tokens of a prompt
REFUSED = "a-picture"  # a model of this name is refused
COMMAND = (sys.executable, str(Path(__file__).resolve()))


@dataclass
class FaultyRunner(FakeRunner):
    """Each step with a SLOW row takes 10 ms."""

    def run(self, batch: Batch) -> list[RowOutput]:
        tokens = {token for row in batch.rows for token in row.token_ids}
        self.slow = getattr(self, "slow", False) or SLOW in tokens
        if self.slow:
            time.sleep(0.01)
        if CRASH in tokens:
            ctypes.string_at(0)
        if EXIT in tokens:
            os._exit(7)
        if HANG in tokens:
            os.kill(os.getpid(), signal.SIGSTOP)  # so that others can see when it hangs
            threading.Event().wait()  # the signal stops this thread a little later than another one
        self.is_broken = FATAL in tokens
        if BUG in tokens or self.is_broken:
            return []  # the scheduler counts on one output per row
        outputs = super().run(batch)
        return [replace(output, token_id=2**70) for output in outputs] if UNSPEAKABLE in tokens else outputs

    def clear_slot(self, index: int) -> None:
        if getattr(self, "is_broken", False):
            raise RuntimeError("the device is lost")  # so the loop cannot build its tables anew either
        super().clear_slot(index)


class FakeValidator:
    """Knows no tensors."""

    def convert(self, staged: StagedAdapter) -> None:
        """Nothing is done."""

    def validate(self, staged: StagedAdapter, *, allow_noop: bool) -> AdapterSize:
        return AdapterSize(1, 100)

    def forget(self, digest: str) -> None:
        """There is nothing."""


class FakeServed:
    """Adapters load at once, one named "broken" never; one named "slow" when the process ends."""

    def __init__(self) -> None:
        self._world = World(max_num_seqs=4)
        self._runner = FaultyRunner(self._world.settings.block_size)
        self.spec = fake_spec()
        self.mailbox: queue.SimpleQueue[Mail] = queue.SimpleQueue()
        self.validator = FakeValidator()
        self.is_warm = False
        self.makes_slow_ones_wait = True
        self.engine = self.rebuild()

    def rebuild(self) -> Engine:
        settings = self._world.settings
        slices = settings.part(EngineConfig), settings.part(AdapterConfig)
        return build_engine(self._runner, self.spec, self._world.num_blocks, *slices, self._submit)

    def warm_up_done(self) -> None:
        self.is_warm = True

    def _submit(self, ref: AdapterRef) -> None:
        if ref.name == "slow" and self.makes_slow_ones_wait:
            return
        error = AdapterUnavailableError("it is broken") if ref.name == "broken" else None
        self.mailbox.put(LoadFinished(ref.digest, None if error else ref.digest, error, 0.0))


def fake_spec():  # type: ignore[no-untyped-def]
    from lora_serve.core.model_spec import LinearShape, ModelSpec

    return ModelSpec("fake", "Fake", 2000, 200, (1000,), 1, {"q": LinearShape(4, 4)}, 0, "float32", "cpu")


class FakeEngine:
    def __init__(self) -> None:
        self.service: EngineService | None = None

    def take(self, message: ToEngine) -> None:
        assert self.service is not None
        self.service.take(message)

    def stop(self) -> None:
        assert self.service is not None
        self.service.stop()


def main() -> int:
    channel, messages = open_channel()
    configure = next(messages)
    assert isinstance(configure, Configure)
    if configure.model.model == REFUSED:
        channel.send([LoadRefused(ModelError("It is a picture."))])
        channel.close()
        return 2
    engine, served = FakeEngine(), FakeServed()
    engine.service = EngineService(served, channel.send)
    channel.send([Ready(served.spec)])
    return run(engine, channel, messages)


if __name__ == "__main__":
    sys.exit(main())
