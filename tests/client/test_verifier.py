"""The registry's thread asks the engine on the event loop, and gives up in time."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lora_serve.client.verifier as module
import lora_serve.model.lora.validation as validator_module
from lora_serve.adapters.checkpoint.saved import SavedAdapter, SavedLinear
from lora_serve.adapters.registration.verification import StagedAdapter, ValidationBudget
from lora_serve.client.verifier import EngineVerifier, RemoteValidator
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import AdapterUnavailableError, InvalidAdapterError, NotReadyError
from lora_serve.core.messages import AdapterSize, SmokeTest
from lora_serve.model.lora.host_adapter import HostAdapter, LinearDelta
from lora_serve.model.lora.validation import LastFolded, LocalValidator
from tests.mock_engine import MockEngineClient

REF = AdapterRef("default", "a", 0, "sha256:a", 4, 10)


def fold(saved: SavedAdapter) -> HostAdapter:
    deltas = {path: LinearDelta(linear.a, linear.b, linear.scale) for path, linear in saved.linears.items()}
    return HostAdapter(saved.digest, saved.rank, deltas)


def undo(saved: SavedAdapter, init: str) -> SavedAdapter:
    return dataclasses.replace(saved, digest=f"without {init}")


def verifier_of(client: Any) -> EngineVerifier:
    return EngineVerifier(LocalValidator(fold, undo), client, asyncio.get_running_loop())


async def test_probe_goes_to_the_engine_and_comes_back() -> None:
    client = MockEngineClient(50)
    result = await asyncio.to_thread(verifier_of(client).smoke_test, REF, (1, 2))
    assert not result.is_noop
    assert client.commands == [SmokeTest(REF, (1, 2))]


@pytest.mark.parametrize("error", [InvalidAdapterError(["bad"]), NotReadyError("stopping")])
async def test_engines_refusal_reaches_the_registry(error: Exception) -> None:
    client = MockEngineClient(50, command_error=error)  # type: ignore[arg-type]
    with pytest.raises(type(error)):
        await asyncio.to_thread(verifier_of(client).smoke_test, REF, (1,))


async def test_engine_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TIMEOUT", 0.05)

    class Silent:
        async def adapters(self, command: object) -> None:
            await asyncio.Event().wait()

    with pytest.raises(AdapterUnavailableError, match="too busy"):
        await asyncio.to_thread(verifier_of(Silent()).smoke_test, REF, (1,))


@pytest.mark.parametrize("act", ["convert", "validate"])
async def test_engine_is_told_the_time_that_is_left_to_the_registrys_thread(act: str, tmp_path: Path) -> None:
    """Not to the event loop's, which has soon spent more than any registration may."""
    asked: list[Any] = []

    class Client:
        async def call(self, message: Callable[[int], Any]) -> Any:
            asked.append(message(1))
            return AdapterSize(10, 10)

    loop, loops_thread = asyncio.get_running_loop(), threading.get_ident()

    def validate() -> None:
        budget = ValidationBudget(300.0, lambda: 1e6 if threading.get_ident() == loops_thread else 5.0)
        staged: Any = StagedAdapter(tmp_path, SimpleNamespace(digest="sha256:a"), None, 8, budget)  # type: ignore[arg-type]
        validator = RemoteValidator(Client(), loop)  # type: ignore[arg-type]
        validator.convert(staged) if act == "convert" else validator.validate(staged, allow_noop=False)

    await asyncio.to_thread(validate)
    assert [message.seconds for message in asked] == [300.0]


async def test_bytes_are_those_after_folding() -> None:
    saved = SavedAdapter("sha256:a", {"q": SavedLinear(torch.zeros(2, 8), torch.zeros(2, 8), 1.0)})
    assert LocalValidator(fold, undo).num_bytes(saved) == 2 * 2 * 8 * 4


def plain() -> HostAdapter:
    delta = LinearDelta(torch.zeros(2, 8), torch.zeros(2, 8), 1.0)
    return HostAdapter("sha256:a", 2, {"q": delta}, is_plain=True)


async def test_loader_takes_what_was_folded_while_it_is_tried_and_only_then() -> None:
    last_folded, taken = LastFolded(), []

    class Loading(MockEngineClient):
        async def adapters(self, command: Any) -> Any:
            taken.append(last_folded.take(REF))
            return await super().adapters(command)

    validator = LocalValidator(lambda saved: plain(), undo, last_folded)
    verifier = EngineVerifier(validator, Loading(50), asyncio.get_running_loop())
    for _ in range(2):
        validator.num_bytes(SavedAdapter("sha256:a", {}))
        await asyncio.to_thread(verifier.smoke_test, REF, (1, 2))
    assert [adapter and adapter.digest for adapter in taken] == ["sha256:a"] * 2
    assert last_folded.take(REF) is None


def test_at_hand_are_adapters_taken_once_and_of_their_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    last_folded = LastFolded()
    last_folded.put(plain())
    assert last_folded.take(dataclasses.replace(REF, digest="sha256:b")) is None
    assert last_folded.take(REF) is not None
    assert last_folded.take(REF) is None
    other = dataclasses.replace(plain(), digest="sha256:b")
    for kept_bytes, is_there in ((2**20, True), (0, False)):
        monkeypatch.setattr(validator_module, "KEPT_BYTES", kept_bytes)
        last_folded.put(plain())
        last_folded.put(other)
        last_folded.forget(other.digest)
        assert last_folded.take(dataclasses.replace(REF, digest="sha256:b")) is None
        assert (last_folded.take(REF) is not None) == is_there


def test_adapter_that_depends_on_its_cards_rank_or_the_base_is_not_kept_at_hand() -> None:
    last_folded = LastFolded()
    last_folded.put(dataclasses.replace(plain(), is_plain=False))
    assert last_folded.take(REF) is None
