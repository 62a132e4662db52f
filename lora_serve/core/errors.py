"""The error tree: what can go wrong, in words, with the ids inside.

The tree knows nothing of HTTP; `server/answers.py` is the one place that turns a class into a status.
"""

from __future__ import annotations

import difflib
import errno
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

T = TypeVar("T")
NO_MEMORY = "This machine, or a limit of this process (ulimit -v, its container's), leaves too little memory"
_NO_MEMORY = re.compile(
    "can't start new thread|can't allocate memory|DefaultCPUAllocator|not enough memory|out of memory|bad_alloc|"
    "failed to map segment|[Cc]annot allocate memory"
)
Unit = Literal["requests", "tokens", "registrations", "acts"]
_log = logging.getLogger(__name__)


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing where no known word is near."""
    near = difflib.get_close_matches(given, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def how_to_install(extra: str) -> str:
    return f"pip install 'lora-serve[{extra}]', in a clone ./scripts/install {extra}"


@dataclass(frozen=True, slots=True)
class Standing:
    """One of a caller's limits per minute at one moment."""

    limit: int
    remaining: int
    reset: float  # seconds until nothing of it is used


Standings = Mapping[Unit, Standing]


class LoraServeError(Exception):
    """Base of every error this package raises on purpose; `str(error)` is safe to show to its caller."""


class ConfigError(LoraServeError):
    """A setting is wrong; the message names the flag, the value and what is allowed."""


class DamagedFileError(ConfigError):
    """A database in the store is damaged; the message names it, `reason` is what SQLite says."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class ModelError(LoraServeError):
    """The base model is missing, broken, or cannot be served exactly."""


class RequestError(LoraServeError):
    """The caller's input is wrong."""


class InvalidRequestError(RequestError):
    """A field of the request is wrong; `param` names it, `code` is OpenAI's word for it where there is one."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class AuthenticationError(RequestError):
    """No key was sent, or one that opens nothing (any more)."""


class WrongKeyError(AuthenticationError):
    """The key that was sent is none of this server's."""


class ForbiddenError(RequestError):
    """The key is known and may not do this."""


class QuotaExceededError(ForbiddenError):
    """The tenant has as many adapters, or as many bytes of them, as it may; something has to be deleted first."""


class ForeignSiteError(ForbiddenError):
    """A web page of another site may have made its reader's browser send the request, and no key allows that."""


class AdapterNotFoundError(RequestError):
    """Unknown, foreign or deleted adapter: deliberately one and the same text for all three."""

    def __init__(self, name: str) -> None:
        super().__init__(f"The model `{name}` does not exist or you do not have access to it.")
        self.name = name


class NotFoundError(RequestError):
    """Unknown, foreign or deleted tenant or key: one and the same text too. `kind`: "tenant" or "key"."""

    def __init__(self, name: str, kind: str = "tenant") -> None:
        super().__init__(f"The {kind} `{name[:200]}` does not exist or you do not have access to it.")
        self.kind = kind
        self.name = name


class ConflictError(RequestError):
    """The admin's change contradicts the state that is there."""


class PayloadTooLargeError(RequestError):
    """The body is larger than the limit."""


class SlowRequestError(RequestError):
    """The body did not arrive in time."""


class UnsupportedMediaError(RequestError):
    """The body's content type or encoding is not understood."""


class InvalidAdapterError(RequestError):
    """The adapter cannot be served exactly; `reasons` lists every cause found, tensor names included."""

    def __init__(self, reasons: Sequence[str]) -> None:
        shown = list(reasons[:8])
        if len(reasons) > len(shown):
            shown.append(f"... and {len(reasons) - len(shown)} more")
        super().__init__("The adapter cannot be served: " + "; ".join(shown))
        self.reasons = tuple(reasons)


class CapacityError(LoraServeError):
    """The request cannot be served now; try again after `retry_after` seconds. `reason`: the label in the metrics."""

    reason = "overloaded"

    def __init__(self, message: str, retry_after: float = 1.0, reason: str = "") -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.reason = reason or type(self).reason


class QueueFullError(CapacityError):
    """The waiting queue is at its limit."""

    reason = "queue_requests"


class TenantQueueFullError(CapacityError):
    """The tenant's own limit of waiting requests is reached; `requests` and `tokens` are (limit, rest)."""

    reason = "tenant_requests"

    def __init__(
        self,
        message: str,
        retry_after: float = 1.0,
        reason: str = "",
        *,
        requests: tuple[int, int] | None = None,
        tokens: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message, retry_after, reason)
        self.requests = requests
        self.tokens = tokens


class RateLimitedError(CapacityError):
    """The requests or tokens of a minute are used up; `retry_after` says when the next may come."""

    reason = "tenant_requests_per_minute"

    def __init__(
        self, message: str, retry_after: float = 1.0, reason: str = "", standings: Standings | None = None
    ) -> None:
        super().__init__(message, retry_after, reason)
        self.standings = standings or {}


class WrongKeysError(RateLimitedError):
    """Another wrong key from an address that has sent many; the right one would be served."""

    reason = "wrong_keys"


class NotReadyError(CapacityError):
    """The server is warming up or draining."""

    reason = "not_ready"


class EngineLostError(CapacityError):
    """The engine ended while it was at work on the request; another one is being started."""

    reason = "engine_lost"


class NeighbourLostError(CapacityError):
    """The server that computed the answer broke off after its first token; nothing is asked a second time."""

    reason = "neighbour_lost"


class AdapterUnavailableError(CapacityError):
    """The adapter's weights cannot be fetched at present."""

    reason = "adapter_unavailable"


class UnreadableRecordError(AdapterUnavailableError):
    """A record makes no sense: what it names is held, neither there nor free, until a person mends it."""

    reason = "unreadable_record"


class LoadHangsError(AdapterUnavailableError):
    """A load of the adapter's weights hangs: the store that has them neither gives them nor fails."""

    reason = "load_hangs"


class DeviceQuotaError(AdapterUnavailableError):
    """The request's adapters do not fit into what the tenant may have on the device at most."""

    reason = "tenant_device_bytes"


class StoreUnwritableError(AdapterUnavailableError):
    """The store on disk cannot be written at present: it is full, over a quota, read-only, or broken."""

    reason = "store_unwritable"


class DeviceMemoryError(CapacityError):
    """The device has no memory for a step; a smaller one may fit. A row ends with this when even one token did not."""


class RequestTimeoutError(LoraServeError):
    """The request's own deadline (`timeout_ms`) passed."""


class InternalError(LoraServeError):
    """A bug of this program or a fault of the machine; only the row that met it ends."""


class NumericalError(InternalError):
    """A row's logits are not finite."""


def is_out_of_memory(error: BaseException) -> bool:
    """True if there was no memory for an object, a tensor, a thread or a library; most say so by words alone."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    said = isinstance(error, RuntimeError | ImportError) and _NO_MEMORY.search(str(error)) is not None
    return said or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch's


def overload(error: BaseException) -> CapacityError | None:
    """The refusal in place of an error that lack of memory caused; None: it has another cause."""
    return CapacityError(f"{NO_MEMORY} at present: try again.") if is_out_of_memory(error) else None


def on_one_line(words: object, most: int = 500) -> str:
    """A text, or an error's message (without one: its kind), without line breaks, cut after `most` characters."""
    return " ".join(str(words).split())[:most] or (type(words).__name__ if isinstance(words, BaseException) else "")


def start_error(error: Exception) -> LoraServeError:
    """The error in words with which a start ends. Raises `error` if there are none."""
    if isinstance(error, LoraServeError):
        return error
    if is_out_of_memory(error):
        return ModelError(f"{NO_MEMORY} to start: {on_one_line(error, 200)}")
    raise error


@contextmanager
def contained() -> Iterator[None]:
    """A block on another thread. InternalError takes the place of what would end the thread or the process: asyncio
    hands SystemExit on to its whole loop.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        _log.exception("an operation wanted to end its thread")
        raise InternalError("The operation failed; the server goes on.") from error
