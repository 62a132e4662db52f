"""Three servers on one Redis under clients, while networks, Redis and servers break; and the judge of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.consistency.cluster import Breaking, figures, look_at_the_end, running
from tests.consistency.judging import HEALING, judged
from tests.consistency.recording import Clients

SEED = 8
PART = 6  # breaks after which the clients go on to fresh ids: a judge's work grows with an id's history


def registry(root: Path, minutes: float) -> dict[str, Any]:
    """What clients saw, and what of it no order explains."""
    root.mkdir()
    started, objects = time.monotonic(), []
    with running(root) as cluster:
        world = cluster.world()
        world.prepare()
        breaking = Breaking(cluster, SEED, kills_servers=True)
        for number in range(10**6):
            if time.monotonic() > started + minutes * 60:
                break
            part = [
                *(("adapter", f"acme/{letter}{number}") for letter in "abc"),
                *(("alias", f"alias/{letter}{number}") for letter in "ab"),
                *(("tenant", f"tenant-{letter}{number}") for letter in "ab"),
            ]
            objects += part
            with Clients(world, part, SEED + number) as clients:
                breaking.run(PART)
            if clients.failures:
                raise clients.failures[0]
        time.sleep(HEALING)
        look_at_the_end(world, objects)
    judgement = judged(world.record.observed, cluster.cuts)
    return {
        **figures(world.record, breaking.done),
        "minutes": minutes,
        "trouble": world.record.trouble[:5],
        "faults": judgement.faults[:5],
        "lag_seconds": judgement.lag,
    }
