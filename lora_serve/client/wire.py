"""What crosses between the server's process and the engine's: tagged records of facts, never an object of Python's.

A request, its adapters and its events are the frozen types of `core/`; calls and errands have a number, by which their
answer finds whoever waits for it. Times are of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

from lora_serve.client.faults import Fault
from lora_serve.client.record import Record
from lora_serve.core.commands import Evict, Pin, Prefetch, Probe, ProbeResult, Resize, Tune, Unpin
from lora_serve.core.config import AdapterConfig, EngineConfig, ModelConfig
from lora_serve.core.events import FinishEvent, PooledEvent, PromptEvent, StartedEvent, TokenEvent
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.request import InferenceRequest
from lora_serve.core.stats import EngineStats

# -- to the engine ---------------------------------------------------------------------------------------------


class Configure(Record):
    """The first record of all: what to load. It holds no secret, as the engine needs none."""

    model: ModelConfig
    engine: EngineConfig
    adapters: AdapterConfig
    log_format: str


class Submit(Record):
    """Answered by events."""

    request: InferenceRequest


class Abort(Record):
    """Nobody waits for it any more."""

    request_id: str


class DoPrefetch(Record):
    command: Prefetch


class DoPin(Record):
    command: Pin


class DoUnpin(Record):
    command: Unpin


class DoEvict(Record):
    command: Evict


class DoResize(Record):
    command: Resize


class DoProbe(Record):
    command: Probe


class DoTune(Record):
    command: Tune


class Order(Record):
    """A command about adapters; answered by Nothing, Probed or CallFailed."""

    call: int
    what: DoPrefetch | DoPin | DoUnpin | DoEvict | DoResize | DoProbe | DoTune


class Stats(Record):
    """Answered by Figures."""

    call: int


class Ping(Record):
    """Answered by Nothing, between two steps."""

    call: int


class MakePlain(Record):
    """See `Trial.make_plain`; answered by Nothing or CallFailed."""

    call: int
    folder: str
    digest: str
    max_rank: int | None


class Weigh(Record):
    """See `Trial.weigh`; answered by Weighed or CallFailed."""

    call: int
    folder: str
    digest: str
    max_rank: int | None
    allow_noop: bool


class Forget(Record):
    """The adapter that was weighed was tried."""


class Settle(Record):
    """The warm-up is over: from now on loads give way to steps."""


class Stop(Record):
    """End; whoever still waits gets NotReadyError."""


class BlobGiven(Record):
    """OpenBlob's answer: a folder that stays until CloseBlob."""

    errand: int
    folder: str
    tier: str
    fetch: float  # seconds
    verify: float


class ErrandDone(Record):
    """KeepBeside's answer."""

    errand: int


class ErrandFailed(Record):
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
    | MakePlain
    | Weigh
    | Forget
    | Settle
    | Stop
    | BlobGiven
    | ErrandDone
    | ErrandFailed
)

# -- from the engine -------------------------------------------------------------------------------------------


class Ready(Record):
    """The model is loaded and has proved exact; requests are taken."""

    spec: ModelSpec


class Refused(Record):
    """It cannot be loaded; the process ends."""

    fault: Fault


class Started(Record):
    event: StartedEvent


class Prompt(Record):
    event: PromptEvent


class Token(Record):
    event: TokenEvent


class Pooled(Record):
    event: PooledEvent


class Finish(Record):
    event: FinishEvent


class Failed(Record):
    """An ErrorEvent."""

    request_id: str
    fault: Fault


class Events(Record):
    """All of one step."""

    events: list[Token | Started | Prompt | Pooled | Finish | Failed]


class Nothing(Record):
    """Done; there is nothing to say."""

    call: int


class Probed(Record):
    call: int
    value: ProbeResult


class Figures(Record):
    call: int
    value: EngineStats


class Weighed(Record):
    call: int
    rank: int
    num_bytes: int


class CallFailed(Record):
    call: int
    fault: Fault


class OpenBlob(Record):
    """Hold an adapter's folder. `is_near`: only what is on this machine, and unchecked; else fetched and verified."""

    errand: int
    digest: str
    is_near: bool


class CloseBlob(Record):
    """It was read."""

    errand: int


class KeepBeside(Record):
    """Move a file that the engine has written into the adapter's folder."""

    errand: int
    digest: str
    path: str


Answer = Nothing | Probed | Figures | Weighed | CallFailed
Errand = OpenBlob | CloseBlob | KeepBeside
FromEngine = (
    Ready | Refused | Events | Nothing | Probed | Figures | Weighed | CallFailed | OpenBlob | CloseBlob | KeepBeside
)
