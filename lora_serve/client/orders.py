"""Commands about adapters as records, one kind for each."""

from __future__ import annotations

from lora_serve.client.wire import DoEvict, DoPin, DoPrefetch, DoProbe, DoResize, DoTune, DoUnpin
from lora_serve.core.commands import AdapterCommand, Evict, Pin, Prefetch, Probe, Resize, Tune, Unpin

Written = DoPrefetch | DoPin | DoUnpin | DoEvict | DoResize | DoProbe | DoTune


def order_of(command: AdapterCommand) -> Written:
    match command:
        case Prefetch():
            return DoPrefetch(command)
        case Pin():
            return DoPin(command)
        case Unpin():
            return DoUnpin(command)
        case Evict():
            return DoEvict(command)
        case Resize():
            return DoResize(command)
        case Probe():
            return DoProbe(command)
        case Tune():
            return DoTune(command)
