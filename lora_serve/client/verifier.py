"""Tries an adapter on the running engine, for the registry (see `adapters/registration/verification.py`). No torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Protocol, TypeVar

from lora_serve.adapters.checkpoint.content import adapter_digest
from lora_serve.adapters.registration.verification import AdapterVerifier, StagedAdapter, Steps
from lora_serve.client.base import EngineClient
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.messages import (
    AdapterSize,
    Convert,
    Converted,
    EngineCall,
    ForgetStaged,
    ReplyValue,
    SmokeTest,
    SmokeTestResult,
    ToEngine,
    Validate,
)

T = TypeVar("T")
_TIMEOUT = 120.0  # seconds; a smoke test waits for one step, one load and free host memory


class WeightsValidator(Protocol):
    """The checks that a verifier makes beside the engine; called on the registry's threads."""

    def convert(self, staged: StagedAdapter) -> None:
        """See `AdapterVerifier.convert`."""

    def validate(self, staged: StagedAdapter, *, allow_noop: bool) -> AdapterSize:
        """See `AdapterVerifier.validate`. Keeps the folded adapter for the smoke test's load."""

    def forget(self, digest: str) -> None:
        """Drops the folded adapter: its smoke test is over."""


class RemoteEngine(EngineClient, Protocol):
    """The client of an engine in another process."""

    async def call(self, message: Callable[[int], EngineCall]) -> ReplyValue:
        """See `MessageClient.call`."""

    def tell(self, message: ToEngine) -> None:
        """Send a message that is not answered."""


@dataclass(frozen=True)
class RemoteValidator(WeightsValidator):
    """The engine's process reads the adapter's folder, or asks the client for its files."""

    _client: RemoteEngine
    _loop: asyncio.AbstractEventLoop

    def convert(self, staged: StagedAdapter) -> None:
        folder, digest, seconds = staged.folder.absolute(), staged.artifact.digest, staged.budget.left
        done = self._call(lambda call_id: Convert(call_id, folder, digest, staged.max_rank, seconds))
        if isinstance(done, Converted) and adapter_digest(folder) != done.digest:
            raise AdapterUnavailableError("The adapter was damaged on its way from the engine; try again.")

    def validate(self, staged: StagedAdapter, *, allow_noop: bool) -> AdapterSize:
        folder, digest, seconds = staged.folder.absolute(), staged.artifact.digest, staged.budget.left
        size = self._call(lambda call_id: Validate(call_id, folder, digest, staged.max_rank, allow_noop, seconds))
        assert isinstance(size, AdapterSize)
        return size

    def forget(self, digest: str) -> None:
        self._loop.call_soon_threadsafe(self._client.tell, ForgetStaged(digest))

    def _call(self, message: Callable[[int], EngineCall]) -> ReplyValue:
        """On a registry's thread. However long it takes: the engine's end, if it comes to that, ends the wait."""
        try:
            return asyncio.run_coroutine_threadsafe(self._client.call(message), self._loop).result()
        except CancelledError:
            raise AdapterUnavailableError("The server is shutting down.") from None


@dataclass(frozen=True)
class EngineVerifier(AdapterVerifier):
    """Called on the registry's threads; the smoke test is an ordinary command to the engine, put on the event loop."""

    _validator: WeightsValidator
    _client: EngineClient
    _loop: asyncio.AbstractEventLoop

    def convert(self, staged: StagedAdapter) -> None:
        self._validator.convert(staged)

    def validate(self, staged: StagedAdapter, *, allow_noop: bool) -> AdapterSize:
        return self._validator.validate(staged, allow_noop=allow_noop)

    def smoke_test(self, adapter: AdapterRef, token_ids: tuple[int, ...]) -> SmokeTestResult:
        future = asyncio.run_coroutine_threadsafe(self._client.adapters(SmokeTest(adapter, token_ids)), self._loop)
        try:
            result = future.result(_TIMEOUT)
        except (TimeoutError, CancelledError):
            future.cancel()
            raise AdapterUnavailableError("The engine is too busy to try the adapter; try again.") from None
        finally:
            self._validator.forget(adapter.digest)
        assert result is not None, "the engine answers a smoke test with its result"
        return result


def remote_verifier(client: RemoteEngine) -> EngineVerifier:
    """The verifier for an engine in another process. Called on the event loop."""
    loop = asyncio.get_running_loop()
    return EngineVerifier(RemoteValidator(client, loop), client, loop)


def carried_out(steps: Steps[T], verifier: AdapterVerifier) -> T:
    """The result of a registration's steps: whatever they ask the verifier to do is done, on this thread."""
    try:
        call = next(steps)
        while True:
            try:
                answer = call(verifier)
            except BaseException as error:
                call = steps.throw(error)
            else:
                call = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result
