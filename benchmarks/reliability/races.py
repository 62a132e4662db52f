"""Answers under eviction races."""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.reliability.site import ADMIN, Site, get
from tests.canary.races import Outcome, race

RACES = (("thread", 1), ("thread", 2), ("thread", 4), ("process", 2))  # --engine, --max-loras


def races(site: Site, num_answers: int) -> list[dict[str, Any]]:
    """The answers are shared out evenly."""
    results = []
    for engine, slots in RACES:
        flags = ("--engine", engine, "--max-loras", str(slots), "--max-cpu-loras", "6")
        with site.server(f"race-{engine}-{slots}", *flags) as process:
            outcome = asyncio.run(race(process.url, ADMIN, site.runners, -(-num_answers // len(RACES)), seed=slots))
            evictions = asyncio.run(get(process, "/admin/engine"))["tiers"]["device"]["evictions"]
        results.append({"engine": engine, "slots": slots, **figures_of(outcome), "evictions": evictions})
        print(f"race: {results[-1]}", flush=True)
    return results


def figures_of(outcome: Outcome) -> dict[str, Any]:
    return {
        "answers": outcome.num_answers,
        "wrong": len(outcome.wrong),
        "first_wrong": outcome.wrong[:5],
        "registrations": outcome.num_registrations,
        "deletions": outcome.num_deletions,
        "asked_while_gone": outcome.num_gone,
        "seconds": round(outcome.seconds, 1),
    }
