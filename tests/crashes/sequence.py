"""A random sequence of acts that is killed at random points, or loses its power there, and what must be found then."""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.crashes.crashing import KILLED, Act, Actor, Order, Points, Told
from tests.crashes.disk import Disk, Loss, read_notes, write_tree
from tests.crashes.world import ACTIONS, World, shown_parts
from tests.redis_server import RedisServer
from tests.stateful.history import TENANTS, an_act

FILES = re.compile(
    r"(catalog|mirror|tenants|tenants-mirror|usage|audit)\.sqlite3(-wal|-shm)?|replica|lock|reserve|position(\.new)?|"
    r"admin_key|hot\.json(\.new)?|cache|"
    r"(cache/)?(tmp|blobs|blobs/[0-9a-f]{64}(/(adapter_config|named-[0-9a-f]{32})\.json|/adapter_model\.safetensors)?)"
)


@dataclass
class Counts:
    """Of all sequences of a test. `learned`: the most points that an act of each kind was seen to have."""

    lives: int = 0
    kills: int = 0
    power_losses: int = 0
    acts: int = 0
    points: int = 0
    learned: dict[str, int] = field(default_factory=lambda: defaultdict(lambda: 40))


class Story:
    """`seed` says all that happens in it. `url`: of the Redis that has the registry; "": the store has it."""

    def __init__(
        self,
        seed: int,
        actor: Actor,
        home: Path,
        digests: Sequence[str],
        counts: Counts,
        url: str = "",
        num_stores: int = 1,
        web: Actor | None = None,
    ) -> None:
        """`web`: acts by HTTP on whole servers; what they leave is looked at by `actor`, as always."""
        self._web = web
        self._draw = random.Random(seed)
        self._actor = actor
        self._home = home
        self._digests = digests
        self._counts = counts
        self._url = url
        self._model = World(checks_tenants=web is not None)
        self._secrets: list[str] = []
        self._num_stores = num_stores
        self._admin_keys: dict[int, str] = {}
        self._started: set[int] = set()  # stores that were opened to the end
        self._died: set[int] = set()  # and those whose last life did not come to its end
        self._num_roots = 0
        self._points = Points(home / "points")
        self.log: list[str] = [f"seed {seed}"]
        self._move_to({})

    def run(self, num_rounds: int, loses_power: bool = False) -> None:
        for _ in range(num_rounds):
            here = self._model.here = self._draw.randrange(self._num_stores)
            acts = self._acts()
            kill = self._kill(acts) if self._draw.random() < 0.9 else None
            before, after = self._after(self._live(acts, kill), acts)
            if self._num_stores > 1:
                after = self._meanwhile(before, after)
            while True:
                if loses_power and self._draw.random() < 0.7:
                    self._lose_power(self._draw.choice(list(Loss)))
                if self._draw.random() < 0.75:
                    break
                self._live([], self._kill([]))  # a start that dies, too
            assert before.here == here
            self._check(self._look(), before, after)
        if self._num_stores > 1:
            self._check_sums()

    def run_while_redis_dies(self, num_rounds: int, redis: RedisServer, points: Points) -> None:
        """It is killed at its own writes, and comes back; `points` are its own."""
        for _ in range(num_rounds):
            acts = self._acts()
            points.kill_in(self._draw.randint(1, 8 * len(acts)))
            before, after = self._after(self._live(acts, None, ends_at=503), acts)
            self.log.append(f"Redis has died: {redis.has_died()}")
            self._counts.kills += redis.has_died()
            redis.stop()
            points.begin()
            redis.mend()
            redis.start()
            self._check(self._look(), before, after)

    def _meanwhile(self, before: World, after: World) -> World:
        """Another store of the same registry sees what was shared, and goes on; the dead one may know more."""
        here, other = before.here, (before.here + 1) % self._num_stores
        before.here = after.here = other
        self._check(self._look(), before, after)
        acts = self._acts()
        before, _ = self._after(self._live(acts, None), acts)
        mine = copy.deepcopy(before)
        for part in ("usage", "audit", "hot"):
            getattr(mine, part)[here] = getattr(after, part)[here]
        before.here = mine.here = here
        return mine

    def _check_sums(self) -> None:
        """Once every store was open, each tells of all."""
        for here in range(self._num_stores):
            self._model.here = here
            state = self._look().state
        assert state is not None
        wanted = dict(sum(self._model.usage.values(), Counter()))
        assert state["all_usage"] == wanted, self._words("usage", state["all_usage"], wanted)
        num_lines = sum(map(len, self._model.audit.values()))
        assert state["num_lines"] == num_lines, self._words("lines", state["num_lines"], num_lines)

    def at(self, acts: list[Act], kill: tuple[int, int], loss: Loss | None) -> bool:
        """One life that dies at a given point, and the next. False: the act, or the start, has no such point."""
        told = self._live(acts, kill)
        before, after = self._after(told, acts)
        if loss is not None:
            self._lose_power(loss)
        self._check(self._look(), before, after)
        is_past = len(told.done) > kill[0] if kill[0] >= 0 else bool(told.first)
        return told.exit_code == KILLED and not is_past

    # -- a life ------------------------------------------------------------------------------------------------

    def _acts(self) -> list[Act]:
        acts, state = [], copy.deepcopy(self._model)
        for _ in range(self._draw.randint(1, 6)):
            acts.append(self._an_act(state))
            state.act(acts[-1])
        return acts

    def _an_act(self, state: World) -> Act:
        draw, tenant = self._draw, self._draw.choice(TENANTS)
        if draw.random() < 0.5:
            return an_act(draw, state, len(self._digests))
        known = [key for key in state.keys if key.is_known]
        number = draw.randrange(len(known)) if known else 0
        choices: list[Act] = [["create_tenant", tenant], ["create_key", tenant]]
        if known:
            choices += [["revoke_key", number, known[number].tenant], ["use_key", number]]
        if self._web is None:  # servers do these when they like
            choices += [["meter", tenant, draw.randint(1, 9)], ["note_hot"]]
        if draw.random() < 0.2:
            choices.append(["delete_tenant", tenant])
        return draw.choice(choices)

    def _kill(self, acts: list[Act]) -> tuple[int, int]:
        """An act, or the start, or the end, and a point in it."""
        number = self._draw.randint(-1, len(acts))
        name = self._start if number < 0 else "end" if number == len(acts) else acts[number][0]
        return number, self._draw.randint(1, self._counts.learned[name])

    @property
    def _start(self) -> str:
        return "start" if self._model.here in self._started else "first start"

    def _look(self) -> Told:
        """A life without acts, to its end; it tells all that it knows."""
        if self._web is not None:
            self._live([], None)
        return self._live([], None, looks=True)

    def _live(self, acts: list[Act], kill: tuple[int, int] | None, ends_at: int = 0, looks: bool = False) -> Told:
        order = Order(
            store=str(self._root / f"store-{self._model.here}"),
            root=str(self._root),
            points=str(self._points.path),
            notes=str(self._notes),
            url=self._url,
            acts=acts,
            kill=kill,
            secrets=self._secrets,
            tells=looks,
            ends_at=ends_at,
        )
        told = (self._actor if looks or self._web is None else self._web).live(order)
        self._note(told, acts, kill)
        assert told.exit_code in (0, KILLED), self._words("an end", told.exit_code, 0)
        if told.first:
            assert told.first.startswith("ready 0 "), self._words("a start", told.first, "ready 0")
            admin_key = told.first.split()[3]
            known = admin_key if self._web else self._admin_keys.setdefault(self._model.here, admin_key)
            assert admin_key == known, self._words("the admin key", "another", "the same")
        return told

    def _note(self, told: Told, acts: list[Act], kill: tuple[int, int] | None) -> None:
        counts, learned = self._counts, self._counts.learned
        self.log.append(f"life, to be killed at {kill}: {told.first or 'dead'}, {told.exit_code}")
        self.log += [f"  {act} -> {done[0]}" for act, done in zip(acts, told.done, strict=False)]
        counts.lives += 1
        counts.kills += told.exit_code == KILLED
        (self._died.add if told.exit_code == KILLED else self._died.discard)(self._model.here)
        counts.acts += len(told.done)
        counts.points += self._points.passed
        if told.first.startswith("ready"):
            learned[self._start] = max(learned[self._start], int(told.first.split()[2]))
            self._started.add(self._model.here)
        for act, (_, points, *_) in zip(acts, told.done, strict=False):
            learned[act[0]] = max(learned[act[0]], int(points))

    def _after(self, told: Told, acts: list[Act]) -> tuple[World, World]:
        """The world as it was acknowledged, and with the act that was under way, if there was one."""
        before = self._model
        for act, (status, _, *secret) in zip(acts, told.done, strict=False):
            self._secrets += secret
            if status == "503":
                return self._refused(before, act)
            wanted = before.act(act)
            assert int(status) == wanted, self._words(str(act), status, wanted)
        after = copy.deepcopy(before)
        if told.exit_code == KILLED and len(told.done) < len(acts):
            num_keys = len(after.keys)
            after.act(acts[len(told.done)])
            for key in after.keys[num_keys:]:
                key.is_known = False
        return before, after

    def _refused(self, before: World, act: Act) -> tuple[World, World]:
        """Nobody knows whether it was done; what is known is that this was answered."""
        after = copy.deepcopy(before)
        num_keys = len(after.keys)
        after.act(act)
        for key in after.keys[num_keys:]:
            key.is_known = False
        line = [act[0], json.dumps(act[1:]), 503]
        after.audit[after.here][-1:] = [line]
        before.audit[before.here].append(line)
        return before, after

    # -- a loss of power ---------------------------------------------------------------------------------------

    def _move_to(self, tree: dict[str, bytes | None]) -> None:
        self._num_roots += 1
        self._root, self._notes = self._home / f"disk-{self._num_roots}", self._home / f"notes-{self._num_roots}"
        write_tree(self._root, tree)
        self._disk, self._num_played = Disk(self._root), 0

    def _lose_power(self, loss: Loss) -> None:
        notes = read_notes(self._notes)
        self._disk.play(notes[self._num_played :])
        tree = self._disk.after_power_loss(loss, self._draw)
        shutil.rmtree(self._root)
        self._move_to(tree)
        self._counts.power_losses += 1
        self._started &= {here for here in self._started if f"store-{here}" in tree}
        self.log.append(f"loss of power: of what was not synced is left {loss.value}: {sorted(tree)}")

    # -- what must be there ------------------------------------------------------------------------------------

    def _check(self, told: Told, before: World, after: World) -> None:
        assert told.state is not None, self._words("a start", told.first, "a state")
        state, old, new = told.state, before.parts(self._digests), after.parts(self._digests)
        found = shown_parts(state, len(self._secrets))
        if self._web is not None:  # their lines are in other words
            found["audit"] = [[ACTIONS[action], outcome] for action, _, outcome in found["audit"]]
            for parts in (old, new):
                parts["audit"] = [[name, outcome] for name, _, outcome in parts["audit"]]
        is_noted = old["audit"] != new["audit"] and found["audit"] == new["audit"]
        for part in found:
            wanted = [new[part]] if is_noted else [old[part], new[part]]
            assert found[part] in wanted, self._words(part, found[part], wanted)
            if old[part] != new[part] == found[part]:
                before.take(part, after)
        assert (state["bad"], state["broken"]) == ([], None), self._words("bytes", state, "")
        kept = sorted({digest for one in state["entries"].values() for digest in one["versions"].values()})
        if self._died:  # its leases end when it is back
            assert set(kept) <= set(state["kept"]), self._words("bytes", state["kept"], kept)
        else:
            assert (state["kept"], state["held"]) == (kept, []), self._words("bytes", state, kept)
        strange = [name for name in state["files"] if not FILES.fullmatch(name)]
        assert not strange, self._words("files", strange, [])
        self._model = before

    def _words(self, name: str, found: object, wanted: object) -> str:
        return "\n".join([*self.log, f"{name}: found {found}, wanted {wanted}"])
