"""Three servers on one Redis whose networks are cut, fall silent and lose answers, and which is killed and restarted:
all that clients saw meanwhile is what docs/how-to/replicas.md promises.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.consistency.cluster import ALL, Breaking, figures, look_at_the_end, running
from tests.consistency.judging import HEALING, judged
from tests.consistency.recording import Act, Clients, Observed
from tests.tiers import by_tier

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
ADAPTERS = [("adapter", f"acme/{letter}") for letter in "abc"]
ALIASES = [("alias", f"alias/{letter}") for letter in "ab"]
TENANTS = [("tenant", f"tenant-{letter}") for letter in "ab"]
OBJECTS = ADAPTERS + ALIASES + TENANTS


@pytest.mark.parametrize("seed", [20])
def test_replicas_agree_as_promised_whatever_breaks(seed: int, tmp_path: Path) -> None:
    with running(tmp_path) as cluster:
        world = cluster.world()
        world.prepare()
        breaking = Breaking(cluster, seed)
        with Clients(world, OBJECTS, seed) as clients:
            time.sleep(5)
            breaking.run(by_tier(12, 18))
        assert not clients.failures
        time.sleep(HEALING)
        look_at_the_end(world, OBJECTS)
    world.record.save(tmp_path / "history.jsonl")
    (tmp_path / "cuts").write_text(repr([(sorted(cut.replicas), cut.start, cut.end) for cut in cluster.cuts]))
    judgement = judged(world.record.observed, cluster.cuts)
    print(figures(world.record, breaking.done), judgement.lag)
    assert not world.record.trouble
    assert not judgement.faults


def may_be_done(kind: str, act: Act) -> bool:
    """Without what takes something away from an id or a tenant: where branches are merged, both count."""
    return act[0] not in ("delete", "roll_back", "set_route")


@pytest.mark.parametrize("seed", [21])
def test_redis_that_comes_back_older_again_and_again_is_given_back_what_was_acknowledged(
    seed: int, tmp_path: Path
) -> None:
    """Without an append-only file: each restart is one from a snapshot, after which some was done and much was read."""
    draw = random.Random(seed)
    objects = ADAPTERS + TENANTS
    doomed = []
    with running(tmp_path, append_only=False) as cluster:
        world = cluster.world()
        with Clients(world, objects, seed, allowed=may_be_done) as clients:
            for number in range(by_tier(3, 5)):
                doomed.append(("adapter", f"doomed/{number}"))
                assert world.do(*doomed[-1], ("register", 0, True), draw.choice(world.replicas))
                time.sleep(draw.uniform(2.5, 4))  # all have heard of it
                with cluster.redis.client() as client:
                    client.save()
                assert world.do(*doomed[-1], ("delete", None), draw.choice(world.replicas))
                time.sleep(draw.uniform(0, 4))
                with cluster.cut(*ALL):
                    cluster.redis.kill()
                    cluster.redis.start()
                time.sleep(HEALING)
        assert not clients.failures
        time.sleep(HEALING)
        num_before = len(world.record.observed)
        look_at_the_end(world, objects + doomed)
    world.record.save(tmp_path / "history.jsonl")
    observed, last = world.record.observed[:num_before], world.record.observed[num_before:]
    assert not world.record.trouble
    assert lost(observed, last) == []
    assert {one.answer for one in last if (one.kind, one.name) in doomed} == {None}
    for name in [name for _, name in ADAPTERS]:
        assert len({(one.act, one.answer) for one in last if one.name == name}) == 2, "the replicas do not agree"
    assert not judged([one for one in world.record.observed if one.kind == "tenant"], cluster.cuts).faults


def lost(observed: Sequence[Observed], last: Sequence[Observed]) -> list[Observed]:
    """Acknowledged registrations whose content some replica does not show at the end."""
    shown = {
        (one.name, content)
        for one in last
        if one.act == ("show",) and one.answer is not None
        for _, content in one.answer[0]
    }
    made = [one for one in observed if one.act[0] == "register" and one.status in (200, 201)]
    return [one for one in made if (one.name, one.act[1]) not in shown and not one.name.startswith("doomed/")]
