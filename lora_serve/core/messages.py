"""The map of the system: every message between the server's event loop and an engine, in both directions.

An engine in a thread gets and gives these very objects; an engine in a process gets and gives them as MessagePack, each
as [class name, field, ...] (`client/wire.py`). A call has an id, which its `Reply` names. Files are
named by paths, or cross in pieces (`blob_messages.py`); no tensor and no other Python object crosses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import msgspec

from lora_serve.core.adapter import AdapterRef
from lora_serve.core.blob_messages import BlobFiles, BlobFolder, BlobMessage, FilePiece
from lora_serve.core.config import AdapterConfig, EngineConfig, ModelConfig
from lora_serve.core.errors import InvalidRequestError, LoraServeError
from lora_serve.core.live import Call, EngineView, Message
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.request import FinishReason, InferenceRequest
from lora_serve.core.setting_groups.engine import BatchLimits
from lora_serve.core.stats import EngineStats, ReplicaReport
from lora_serve.core.tenant import TenantBudget


class RequestEvent(Message, frozen=True):
    """The base of everything that a step says of a request."""

    request_id: str


# -- commands about adapters ---------------------------------------------------------------------------------------


class Prefetch(Message, frozen=True):
    """Bring the adapter onto the device if a slot is free or evictable, or to host memory; done when it is there."""

    adapter: AdapterRef
    to: Literal["device", "host"] = "device"


class Pin(Message, frozen=True):
    """Prefetch, and never evict until unpinned."""

    adapter: AdapterRef


class Unpin(Message, frozen=True):
    """Allow the adapter's eviction again."""

    digest: str


class Evict(Message, frozen=True):
    """Drop the adapter from device and host memory once no row holds it."""

    digest: str
    forget: bool = False  # drop its figures too: the adapter is deleted, not only moved out


class Resize(Message, frozen=True):
    """New limits of the tiers, at once; None: unchanged. Adapters in use leave when their last row ends."""

    max_loras: int | None = None  # device slots
    adapter_memory: int | None = None
    adapter_host_memory: int | None = None
    max_cpu_loras: int | None = None


class SetTenantBudgets(Message, frozen=True):
    """Budgets of all tenants that have one, from now on; resident adapters stay until another needs their place."""

    budgets: tuple[TenantBudget, ...]


class SmokeTest(Message, frozen=True):
    """Run a prompt with the base model and with the adapter, to see the difference; answered by a SmokeTestResult."""

    adapter: AdapterRef
    token_ids: tuple[int, ...]


class Tune(Message, frozen=True):
    """New limits of the batcher, from the next step on; None: unchanged. 0 turns off what may be off."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    batch_wait_ms: float | None = None
    preferred_batch_size: int | None = None
    latency_target_ms: float | None = None
    inter_token_target_ms: float | None = None

    MAY_BE_OFF: ClassVar = ("preferred_batch_size", "latency_target_ms", "inter_token_target_ms")

    def applied_to(self, limits: BatchLimits) -> BatchLimits:
        """The limits after the change. Raises InvalidRequestError for limits that contradict one another."""
        changes = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        new = replace(limits, **changes | {name: None for name in self.MAY_BE_OFF if changes.get(name) == 0})
        if new.max_num_batched_tokens < new.max_num_seqs:
            raise InvalidRequestError(
                f"`max_num_batched_tokens` ({new.max_num_batched_tokens}) must be at least `max_num_seqs` "
                f"({new.max_num_seqs}): each running row takes one token per step.",
                param="max_num_seqs" if self.max_num_batched_tokens is None else "max_num_batched_tokens",
            )
        return new


AdapterCommand = Prefetch | Pin | Unpin | Evict | Resize | SetTenantBudgets | SmokeTest | Tune


# -- to the engine -------------------------------------------------------------------------------------------------


class Configure(Message, frozen=True):
    """The first message to an engine's process: what to load. Holds no secret, as the engine needs none."""

    model: ModelConfig
    engine: EngineConfig
    adapters: AdapterConfig
    log_format: str


class Submit(Message, frozen=True):
    """A new request; answered by events."""

    request: InferenceRequest


class Abort(Message, frozen=True):
    """The client left, or (`is_answered`) has all that it wants: a stop string came, or a call of a tool.

    Ids that are not known are fine: their requests ended meanwhile.
    """

    request_id: str
    is_answered: bool = False


class Command(Call, frozen=True):
    """A command about an adapter; answered when it is done: by None, a smoke test's result, or the error."""

    command: AdapterCommand


class GetStats(Call, frozen=True):
    """Asks for an EngineStats, made between two steps."""


class Watch(Call, frozen=True):
    """Asks for an EngineView, made between two steps; for some seconds from then on the engine notes what it does."""

    since: int = 0  # `mark` of the last look that this caller got
    tenants: tuple[str, ...] = ()  # of whom the first requests that wait are shown, beside the first of all
    in_full: bool = False  # with settings


class Ping(Call, frozen=True):
    """Answered by None between two steps, so that the watchdog sees progress."""


class Convert(Call, frozen=True):
    """See `AdapterVerifier.convert`; answered by None, or Converted where the folder is elsewhere."""

    folder: Path | None  # None: the engine does not see it, and asks for its files by OpenStaged
    digest: str
    max_rank: int | None
    seconds: float  # of processor time that the work may take


class Validate(Call, frozen=True):
    """See `AdapterVerifier.validate`; answered by an AdapterSize."""

    folder: Path | None  # as in Convert
    digest: str
    max_rank: int | None
    allow_noop: bool
    seconds: float  # of processor time that the work may take


class ForgetStaged(Message, frozen=True):
    """The registration is over: free what its validation kept for the smoke test's load."""

    digest: str


class WarmUpDone(Message, frozen=True):
    """From now on loads of adapters give way to steps."""


class Stop(Message, frozen=True):
    """End the engine; requests that still wait get NotReadyError."""


# -- from the engine -----------------------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """The model is loaded and has proved exact; requests are taken."""

    spec: ModelSpec


class Greeting(Message, frozen=True):
    """The first message of a fleet's replica to each gateway; `Ready` follows."""

    replica: str  # its name in Ray Serve
    machine: str  # see `core/process.py`
    files: str  # likewise
    node: str  # the machine's address
    age: float  # seconds since its start
    version: str  # of this program
    settings: str  # a digest of what it was configured with
    roots_key: bytes  # see `routing/fleet_view.py`
    now: float = 0.0  # its time.monotonic(); another version, known by `version`, may not say it


class Reported(Message, frozen=True):
    """The report that a fleet's replica makes each second."""

    report: ReplicaReport
    num_servers: int  # that are attached


class LoadRefused(Message, frozen=True):
    """The model cannot be loaded; the engine's process ends."""

    error: LoraServeError


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability (natural log, of the raw model distribution) of one token and of the best ones there."""

    token_id: int
    logprob: float
    rank: int  # 1: the most likely token
    top: tuple[tuple[int, float], ...]  # (token id, logprob), best first


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds spent before the first token."""

    queue: float  # waiting for a place, adapter loading not counted
    load: float  # waiting for the adapter's weights
    prefill: float  # from the first scheduled chunk to the first token


class StartedEvent(RequestEvent, frozen=True):
    """The request has left the queue: its first tokens are in a step. Between engine and client only."""


class PromptEvent(RequestEvent, frozen=True):
    """The prompt is computed; always the first event of a request that is not refused."""

    timings: Timings
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None  # one per prompt token, the first is None
    num_cached_tokens: int = 0  # prompt tokens whose K and V were found, not computed
    fell_back: bool = False  # the request's `fallback` answers, not its `adapters`
    replica: str = ""  # the engine of a fleet that computed it, as its client knows; empty: no fleet did


class TokenEvent(RequestEvent, frozen=True):
    """One generated token."""

    token_id: int
    logprobs: TokenLogprobs | None


class PooledEvent(RequestEvent, frozen=True):
    """The vector of a request with `pooling`: an embedding, normalised if the model says so, or labels' logits."""

    values: bytes  # float32, little-endian


class FinishEvent(RequestEvent, frozen=True):
    """The sequence ended well; `stop_token_id` is the end-of-text or stop id that ended it, if one did."""

    reason: FinishReason
    stop_token_id: int | None = None


class ErrorEvent(RequestEvent, frozen=True):
    """The sequence ended badly; nothing follows."""

    error: LoraServeError


class LostEvent(RequestEvent, frozen=True):
    """All that came so far is lost with its engine; reading on asks for it again, from the start. By a client only."""

    error: LoraServeError  # to be raised instead by a caller that has shown some of it


class SmokeTestResult(Message, frozen=True):
    """The largest differences between two runs' logits."""

    logit_change: float  # base against adapter; NaN if the adapter gives no numbers
    noise: float  # base against base, in the same batch
    logit_scale: float  # the base's own largest logit

    @property
    def is_noop(self) -> bool:
        """Whether the change is no more than rounding."""
        return not self.logit_change > max(8 * self.noise, 1e-6 * self.logit_scale)


class AdapterSize(Message, frozen=True):
    """The size of an adapter as it will be served."""

    rank: int  # the largest of any module
    num_bytes: int  # of host memory


class Converted(Message, frozen=True):
    """The staged folder's files were written by WritePiece."""

    digest: str  # of them


# -- answers to calls, in both directions --------------------------------------------------------------------------

ReplyValue = (
    None | SmokeTestResult | AdapterSize | Converted | BlobFolder | BlobFiles | FilePiece | EngineStats | EngineView
)


class Reply(Message, frozen=True):
    """The call is done, or has failed with a LoraServeError or an OSError; other exceptions become InternalErrors."""

    call_id: int
    value: ReplyValue = None
    error: Exception | None = None  # None: it is done


Event = PromptEvent | TokenEvent | PooledEvent | FinishEvent | ErrorEvent | LostEvent  # what a caller of `infer` gets
StepEvent = Event | StartedEvent  # what a step gives
ToLoop = Submit | Abort | Command | GetStats | Watch | Ping | Stop  # into the engine loop's mailbox
FromLoop = StepEvent | Reply
EngineCall = Command | GetStats | Watch | Ping | Convert | Validate
ToEngine = ToLoop | EngineCall | Configure | ForgetStaged | WarmUpDone | Reply
FromEngine = FromLoop | BlobMessage | Ready | LoadRefused | Greeting | Reported
