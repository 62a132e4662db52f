"""--wait: waits until every server shows a change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lora_serve.commands.failure import CommandError, ExitCode
from lora_serve.commands.flags import adapter_path

if TYPE_CHECKING:
    from lora_serve.commands.admin_client import AdminClient
    from lora_serve.commands.verb import Call

FIRST_PAUSE = 0.05  # seconds; doubled up to LONGEST_PAUSE
LONGEST_PAUSE = 1.0

Card = dict[str, Any]
Condition = Callable[[Card | None], str]  # a card (None: there is none) -> what it lacks; "": nothing


async def wait_for_all(call: Call, adapter_id: str, condition: Condition) -> None:
    """Waits for all servers, and names them. Raises CommandError (REFUSED), with a line per server, if one refuses to
    tell, or has not followed within --timeout.
    """
    deadline = time.monotonic() + call.timeout
    missing = await asyncio.gather(*(_wait(client, adapter_id, condition, deadline) for client in call.clients))
    lines = [f"{client.url}: {reason or 'done'}" for client, reason in zip(call.clients, missing, strict=True)]
    if any(missing):
        first = f"{call.client.url} took the change, but it is not seen everywhere (--timeout {call.timeout:g}):"
        raise CommandError(ExitCode.REFUSED, first, *lines)
    if len(lines) > 1:
        call.output.note(*lines)


async def _wait(client: AdminClient, adapter_id: str, condition: Condition, deadline: float) -> str:
    """The change that a server still lacks at the deadline; one that is away or not ready may come back until then."""
    pause, missing = FIRST_PAUSE, "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            missing = condition((await asyncio.wait_for(client.call("GET", adapter_path(adapter_id)), left)).data)
        except TimeoutError:
            break
        except CommandError as error:
            said = " ".join(error.lines).removeprefix(f"{client.url}: ")
            missing = condition(None) if error.code is ExitCode.NOT_FOUND else said
            if error.code is ExitCode.REFUSED:
                break
        if not missing:
            break
        await asyncio.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, LONGEST_PAUSE)
    return missing


def shows(expected: Card) -> Condition:
    """A check that a card routes the id as `expected` does and has all of its versions, by digest."""

    def missing(card: Card | None) -> str:
        if card is None:
            return "it does not know the adapter"
        if unknown := _versions(expected) - _versions(card):
            return f"it has no version {', '.join(str(version) for version, _ in sorted(unknown))} of this content"
        if _route(card) != _route(expected):
            return f"it serves {_route_text(card)} instead of {_route_text(expected)}"
        return ""

    return missing


def is_gone(version: int | None) -> Condition:
    """A check that there is no card any more, or one without `version`."""

    def missing(card: Card | None) -> str:
        if card is None or (version is not None and all(number != version for number, _ in _versions(card))):
            return ""
        return "it still has it"

    return missing


def _versions(card: Card) -> set[tuple[int, str]]:
    return {(version["version"], version["digest"]) for version in card.get("versions", [])}


def _route(card: Card) -> tuple[Any, ...]:
    canary = (card.get("route") or {}).get("canary") or {}
    return card.get("version"), card.get("digest"), canary.get("version"), canary.get("percent")


def _route_text(card: Card) -> str:
    version, _, other, share = _route(card)
    return f"version {version}" + (f" with {share} % to version {other}" if other is not None else "")
