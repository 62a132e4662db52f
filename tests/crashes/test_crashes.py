"""Killed before, amid or after any touch of files and Redis, or out of power there: what was acknowledged is found
again, what was under way is done or not, and nothing is left behind.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
import redis

from tests.crashes.conftest import Victim
from tests.crashes.crashing import Act, Order, Points
from tests.crashes.disk import Call, Disk, Loss, read_notes, read_tree
from tests.crashes.sequence import Counts, Story
from tests.redis_server import RedisServer
from tests.tiers import by_tier, mostly_nightly

NUM_SEEDS = 25  # of each test of the nightly tier
COUNTS = Counts()
REGISTER: Act = ["register", "acme/a", 0, True, False]
AGAIN: Act = ["register", "acme/a", 1, True, False]
OTHER: Act = ["register", "globex/a", 1, True, False]
# The last act of each is the one that dies.
SCENES: dict[str, list[Act]] = {
    "register": [REGISTER],
    "another_version": [REGISTER, AGAIN],
    "the_same_content": [REGISTER, ["register", "acme/b", 0, True, True]],
    "set_route": [REGISTER, AGAIN, ["set_route", "acme/a", 1, [2, 5.0]]],
    "roll_back": [REGISTER, AGAIN, ["roll_back", "acme/a"]],
    "delete_version": [REGISTER, AGAIN, ["delete", "acme/a", 1]],
    "delete": [REGISTER, ["set_alias", "live", "acme/a"], ["delete", "acme/a", None]],
    "set_alias": [REGISTER, OTHER, ["set_alias", "live", "acme/a"], ["set_alias", "live", "globex/a"]],
    "remove_alias": [REGISTER, ["set_alias", "live", "acme/a"], ["remove_alias", "live"]],
    "pin": [REGISTER, ["set_pinned", "acme/a", True]],
    "share": [REGISTER, ["share", "acme/a", ["globex", "initech"]]],
    "create_tenant": [["create_tenant", "acme"]],
    "create_key": [["create_tenant", "acme"], ["create_key", "acme"]],
    "revoke_key": [["create_tenant", "acme"], ["create_key", "acme"], ["revoke_key", 0, "acme"]],
    "use_key": [["create_tenant", "acme"], ["create_key", "acme"], ["use_key", 0]],
    "delete_tenant": [["create_tenant", "acme"], ["create_key", "acme"], REGISTER, ["delete_tenant", "acme"]],
    "meter": [["meter", "acme", 3], ["meter", "acme", 4]],
    "note_hot": [REGISTER, ["note_hot"], AGAIN, ["note_hot"]],
}
BY_DAY = ("register", "delete_version", "create_key", "meter", "delete_tenant")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: which of its bytes would survive is worked out, not tried."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else tmp_path))
    yield folder
    shutil.rmtree(folder)


def clean(url: str) -> str:
    with redis.Redis.from_url(url) as client:
        client.flushall()
    return url


@pytest.mark.nightly
def test_notes_tell_every_byte_of_the_store(victim: Victim, tmp_path: Path) -> None:
    """What the library did not see would be missing: then not every touch would be a crash point."""
    (root := tmp_path / "disk").mkdir()
    disk, points, notes = Disk(root), Points(tmp_path / "points"), tmp_path / "notes"
    acts = [*SCENES["delete"], *SCENES["revoke_key"], *SCENES["meter"], *SCENES["note_hot"], *SCENES["set_alias"]]
    order = Order(str(root / "store"), str(root), str(points.path), str(notes), acts=acts)
    told = victim.actor.live(order)
    assert (told.exit_code, len(told.done)) == (0, len(acts))
    disk.play(found := read_notes(notes))
    calls = set(Call) - {Call.SEND}
    assert {note.call for note in found} == calls
    assert points.passed == sum(3 if note.call is Call.WRITE else 2 for note in found)
    assert _durable(disk.content()) == _durable(read_tree(root))


def test_power_that_is_lost_takes_what_was_not_synced(victim: Victim, tmp_path: Path) -> None:
    """The disk forgets: a file's bytes until it is synced, a name until its folder is."""
    (root := tmp_path / "disk").mkdir()
    disk = Disk(root)
    points, notes = Points(tmp_path / "points"), tmp_path / "notes"
    victim.actor.live(Order(str(root / "store"), str(root), str(points.path), str(notes), acts=[REGISTER]))
    found = read_notes(notes)
    disk.play([note for note in found if note.call is not Call.SYNC])
    assert disk.after_power_loss(Loss.ALL, random.Random(1)) == {}
    names = disk.after_power_loss(Loss.CONTENT, random.Random(1))
    assert names.keys() == read_tree(root).keys()
    assert not any(names.values())


def _durable(tree: dict[str, bytes | None]) -> dict[str, bytes | None]:
    """Without the indexes of SQLite's logs, which are mapped, and made again at each start."""
    return {name: content for name, content in tree.items() if not name.endswith("-shm")}


@pytest.mark.many(3)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("loss", mostly_nightly([None, Loss.ALL, Loss.SOME], None), ids=str)
@pytest.mark.parametrize("name", mostly_nightly(SCENES, *BY_DAY))
def test_act_that_dies_at_any_point_is_done_or_not(victim: Victim, home: Path, name: str, loss: Loss | None) -> None:
    acts = SCENES[name]
    assert _every_point(victim, home, by_tier(53, 1 if loss is None else 3), acts, len(acts) - 1, loss) > 15


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("loss", mostly_nightly([None, *Loss], Loss.ALL), ids=str)
def test_first_start_that_dies_at_any_point_is_done_again(victim: Victim, home: Path, loss: Loss | None) -> None:
    assert _every_point(victim, home, by_tier(97, 1 if loss is None else 3), [], -1, loss) > 300


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seeds", mostly_nightly(range(40), 0))
def test_sequences_of_acts_and_kills_lose_nothing(victim: Victim, home: Path, seeds: int) -> None:
    for seed, folder in _seeds(seeds, home):
        _story(victim, folder, seed).run(by_tier(2, 3))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seeds", mostly_nightly(range(20), 0))
def test_sequences_of_acts_and_losses_of_power_lose_nothing(victim: Victim, home: Path, seeds: int) -> None:
    for seed, folder in _seeds(seeds, home):
        _story(victim, folder, seed).run(3, loses_power=True)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_stores", mostly_nightly([1, 2], 2))
@pytest.mark.parametrize("seeds", mostly_nightly(range(8), 0))
def test_sequences_on_a_registry_in_redis_lose_nothing(
    victim: Victim, home: Path, seeds: int, num_stores: int, shared_redis: RedisServer
) -> None:
    for seed, folder in _seeds(seeds, home, by_day=1):
        story = Story(seed, victim.actor, folder, victim.digests, COUNTS, clean(shared_redis.url), num_stores)
        story.run(by_tier(2, 3), loses_power=seed % 2 == 1)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seeds", mostly_nightly(range(4), 0))
def test_redis_that_dies_at_any_write_of_its_own_loses_nothing(victim: Victim, home: Path, seeds: int) -> None:
    (data := home / "redis").mkdir()
    points = Points(home / "points")
    points.begin()
    environment = points.environment(victim.library, data)
    server = RedisServer(data, append_only=True, more=["--appendfsync", "always"], environment=environment)
    server.start()
    try:
        for seed, folder in _seeds(seeds, home, by_day=1):
            story = Story(seed, victim.actor, folder, victim.digests, COUNTS, clean(server.url))
            story.run_while_redis_dies(by_tier(2, 3), server, points)
    finally:
        server.stop()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seeds", range(4))
def test_whole_server_that_dies_at_any_point_loses_nothing(victim: Victim, web: Victim, home: Path, seeds: int) -> None:
    for seed, folder in _seeds(seeds, home):
        Story(seed, victim.actor, folder, web.digests, COUNTS, web=web.actor).run(3)


@pytest.fixture(scope="module", autouse=True)
def told() -> Iterator[None]:
    """How much it was."""
    yield
    print(f"\n{COUNTS}")


def _every_point(victim: Victim, home: Path, step: int, acts: list[Act], number: int, loss: Loss | None) -> int:
    """The first point that there is not any more."""
    for point in count(1, step):
        with _folder(home / str(point)) as folder:
            if not _story(victim, folder).at(acts, (number, point), loss):
                return point
    raise AssertionError


def _story(victim: Victim, home: Path, seed: int = 0) -> Story:
    return Story(seed, victim.actor, home, victim.digests, COUNTS)


def _seeds(part: int, folder: Path, by_day: int = 2) -> Iterator[tuple[int, Path]]:
    """By day a few of the first part, at night all of each."""
    for number in range(by_tier(by_day, NUM_SEEDS)):
        with _folder(folder / str(number)) as home:
            yield part * NUM_SEEDS + number, home


@contextmanager
def _folder(path: Path) -> Iterator[Path]:
    path.mkdir()
    yield path
    shutil.rmtree(path)
