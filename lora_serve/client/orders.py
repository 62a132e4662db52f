"""Commands about adapters as records, one kind for each."""

from __future__ import annotations

from lora_serve.client.wire import (
    DoEvict,
    DoPin,
    DoPrefetch,
    DoResize,
    DoSetTenantBudgets,
    DoSmokeTest,
    DoTune,
    DoUnpin,
)
from lora_serve.core.messages import (
    AdapterCommand,
    Evict,
    Pin,
    Prefetch,
    Resize,
    SetTenantBudgets,
    SmokeTest,
    Tune,
    Unpin,
)

Written = DoPrefetch | DoPin | DoUnpin | DoEvict | DoResize | DoSetTenantBudgets | DoSmokeTest | DoTune


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
        case SetTenantBudgets():
            return DoSetTenantBudgets(command)
        case SmokeTest():
            return DoSmokeTest(command)
        case Tune():
            return DoTune(command)
