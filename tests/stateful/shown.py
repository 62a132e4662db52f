"""What a running program shows of its insides, and what it should show, in the same words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_serve.engine.slots import SMOKE_TEST_SLOT
from tests.stateful.expected import Expected
from tests.stateful.program import Program


def shown_cards(program: Program) -> list[Any]:
    """Of each id: id, tenant, pinned, route, aliases, digest of the default, [[version, digest], ...]."""
    cards = program.call("GET", "/admin/adapters").json["data"]
    return [
        [
            *(card[key] for key in ("id", "tenant", "pinned")),
            {key: card["route"][key] for key in ("version", "canary", "history")},
            *(card[key] for key in ("aliases", "digest")),
            [[version["version"], version["digest"]] for version in card["versions"]],
        ]
        for card in cards
    ]


def expected_cards(expected: Expected, digests: list[str]) -> list[Any]:
    """`digests`: by content."""
    return [_card(expected, name, digests) for name in sorted(expected.adapters)]


def shown_aliases(program: Program) -> dict[str, str]:
    return {item["alias"]: item["target"] for item in program.call("GET", "/admin/aliases").json["data"]}


def wrong_tiers(program: Program, letters: Mapping[str, str], named: set[str], pinned: set[str], held: set[str]) -> str:
    """What device and host hold and should not, or do not and should; "" if all is well.

    `letters`: of each digest's weights; the other sets are digests. Raises AssertionError for what may never be.
    """
    engine = program.call("GET", "/admin/engine").json
    slots = {slot["digest"] for slot in engine["slots"]}
    indices = {slot["index"] for slot in engine["slots"]}
    num_slots = program.settings.max_loras
    assert len(indices) == len(slots) == len(engine["slots"]) <= num_slots
    assert held <= slots, "a running answer has lost its slot"
    strays = (slots | set(engine["host_digests"])) - named - held
    marked = {slot["digest"] for slot in engine["slots"] if slot["pinned"]}
    on_device = sorted(letters[digest] for digest in slots)
    in_pool = sorted(letter for index, letter in list(program.runner.slots.items()) if index != SMOKE_TEST_SLOT)
    if strays or marked != pinned or in_pool != on_device:
        return f"strays {strays}; pinned {marked}, not {pinned}; in the pool {in_pool}, not {on_device}"
    return ""


def blobs(program: Program) -> set[str]:
    """Digests in the store folder."""
    folder = program.store / ("blobs" if program.settings.redis_url is None else "cache/blobs")
    return {f"sha256:{path.name}" for path in folder.iterdir()}


def _card(expected: Expected, name: str, digests: list[str]) -> list[Any]:
    adapter = expected.adapters[name]
    canary = adapter.canary and {"version": adapter.canary[0], "percent": adapter.canary[1]}
    return [
        name,
        name.partition("/")[0] if "/" in name else "default",
        adapter.pinned,
        {"version": adapter.route, "canary": canary, "history": adapter.history},
        sorted(alias for alias, target in expected.aliases.items() if target.partition("@")[0] == name),
        digests[adapter.versions[adapter.route]],
        [[number, digests[content]] for number, content in adapter.versions.items()],
    ]
