"""What crosses between the server's process and the engine's: tagged records of facts, never an object of Python's.

A request, its adapters and its events are the frozen types of `core/`; calls and errands have a number, by which their
answer finds whoever waits for it. Times are of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

from lora_serve.client.faults import Fault
from lora_serve.client.record import Record
from lora_serve.core.config import AdapterConfig, EngineConfig, ModelConfig
from lora_serve.core.messages import (
    Evict,
    FinishEvent,
    Pin,
    PooledEvent,
    Prefetch,
    PromptEvent,
    Resize,
    SetTenantBudgets,
    SmokeTest,
    SmokeTestResult,
    StartedEvent,
    TokenEvent,
    Tune,
    Unpin,
)
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.request import InferenceRequest
from lora_serve.core.stats import EngineStats

# -- to the engine ---------------------------------------------------------------------------------------------


class Configure(Record, frozen=True):
    """The first record of all: what to load. It holds no secret, as the engine needs none."""

    model: ModelConfig
    engine: EngineConfig
    adapters: AdapterConfig
    log_format: str


class Submit(Record, frozen=True):
    """Answered by events."""

    request: InferenceRequest


class Abort(Record, frozen=True):
    """Nobody waits for it any more."""

    request_id: str


class DoPrefetch(Record, frozen=True):
    command: Prefetch


class DoPin(Record, frozen=True):
    command: Pin


class DoUnpin(Record, frozen=True):
    command: Unpin


class DoEvict(Record, frozen=True):
    command: Evict


class DoResize(Record, frozen=True):
    command: Resize


class DoSetTenantBudgets(Record, frozen=True):
    command: SetTenantBudgets


class DoSmokeTest(Record, frozen=True):
    command: SmokeTest


class DoTune(Record, frozen=True):
    command: Tune


class Order(Record, frozen=True):
    """A command about adapters; answered by Nothing, SmokeTested or CallFailed."""

    call: int
    what: DoPrefetch | DoPin | DoUnpin | DoEvict | DoResize | DoSetTenantBudgets | DoSmokeTest | DoTune


class Stats(Record, frozen=True):
    """Answered by Figures."""

    call: int


class Ping(Record, frozen=True):
    """Answered by Nothing, between two steps."""

    call: int


class Convert(Record, frozen=True):
    """See `AdapterVerifier.convert`; answered by Nothing or CallFailed."""

    call: int
    folder: str
    digest: str
    max_rank: int | None
    seconds: float  # of the processor that it may take


class Validate(Record, frozen=True):
    """See `AdapterVerifier.validate`; answered by Validated or CallFailed."""

    call: int
    folder: str
    digest: str
    max_rank: int | None
    allow_noop: bool
    seconds: float  # of the processor that it may take


class Forget(Record, frozen=True):
    """What was weighed and is at hand was tried."""


class Settle(Record, frozen=True):
    """The warm-up is over: from now on loads give way to steps."""


class Stop(Record, frozen=True):
    """End; whoever still waits gets NotReadyError."""


class BlobGiven(Record, frozen=True):
    """OpenBlob's answer: a folder that stays until CloseBlob."""

    errand: int
    folder: str
    tier: str
    fetch: float  # seconds
    verify: float


class ErrandDone(Record, frozen=True):
    """KeepBeside's answer."""

    errand: int


class ErrandFailed(Record, frozen=True):
    """Either's."""

    errand: int
    fault: Fault


ToEngine = (
    Configure
    | Submit
    | Abort
    | Order
    | Stats
    | Ping
    | Convert
    | Validate
    | Forget
    | Settle
    | Stop
    | BlobGiven
    | ErrandDone
    | ErrandFailed
)

# -- from the engine -------------------------------------------------------------------------------------------


class Ready(Record, frozen=True):
    """The model is loaded and has proved exact; requests are taken."""

    spec: ModelSpec


class Refused(Record, frozen=True):
    """It cannot be loaded; the process ends."""

    fault: Fault


class Started(Record, frozen=True):
    event: StartedEvent


class Prompt(Record, frozen=True):
    event: PromptEvent


class Token(Record, frozen=True):
    event: TokenEvent


class Pooled(Record, frozen=True):
    event: PooledEvent


class Finish(Record, frozen=True):
    event: FinishEvent


class Failed(Record, frozen=True):
    """An ErrorEvent."""

    request_id: str
    fault: Fault


class Events(Record, frozen=True):
    """All of one step."""

    events: list[Token | Started | Prompt | Pooled | Finish | Failed]


class Nothing(Record, frozen=True):
    """Done; there is nothing to say."""

    call: int


class SmokeTested(Record, frozen=True):
    call: int
    value: SmokeTestResult


class Figures(Record, frozen=True):
    call: int
    value: EngineStats


class Validated(Record, frozen=True):
    call: int
    rank: int
    num_bytes: int


class CallFailed(Record, frozen=True):
    call: int
    fault: Fault


class OpenBlob(Record, frozen=True):
    """Hold an adapter's folder. `is_near`: only what is on this machine, and unchecked; else fetched and verified."""

    errand: int
    digest: str
    is_near: bool


class CloseBlob(Record, frozen=True):
    """It was read."""

    errand: int


class KeepBeside(Record, frozen=True):
    """Move a file that the engine has written into the adapter's folder."""

    errand: int
    digest: str
    path: str


Answer = Nothing | SmokeTested | Figures | Validated | CallFailed
Errand = OpenBlob | CloseBlob | KeepBeside
FromEngine = (
    Ready
    | Refused
    | Events
    | Nothing
    | SmokeTested
    | Figures
    | Validated
    | CallFailed
    | OpenBlob
    | CloseBlob
    | KeepBeside
)
