"""The registry as a whole, driven at random: whatever is registered, routed, deleted, evicted or restarted, every
answer comes from the weights that a model in plain Python says it must come from, and nothing else is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.stateful.letters import BASE_LETTER
from tests.stateful.program import BASE, our_model
from tests.stateful.streams import HeldStream
from tests.stateful.walk import ALIASES, MISSING, NAMES, NUM_CONTENTS, NUM_TOKENS, Call, Walk
from tests.tiers import by_tier

picks = st.sampled_from(range(MISSING + 1))  # of what there is; the last of them means what is not there
contents = st.integers(0, NUM_CONTENTS - 1)
USERS = ("ann", "bob", "cy", "dee", "eve")
users = st.sampled_from(USERS)
percents = st.sampled_from((0.0, 20.0, 50.0, 80.0, 100.0))
calls = st.tuples(
    st.sampled_from(("id", "id", "alias")), picks, st.sampled_from(("", "", "@", "@content:")), picks
)  # kind, which, selector, which


class RegistryMachine(Walk):
    """Names in rules are picked from what there is, so that most steps do something."""

    @initialize(several=st.lists(st.tuples(st.sampled_from(NAMES), contents), min_size=2, max_size=6))
    def begin(self, several: list[tuple[str, int]]) -> None:
        for name, content in several:
            self._register(name, content, activate=True, pin=False)

    # -- changes -----------------------------------------------------------------------------------------------

    @rule(
        name=st.sampled_from(NAMES),
        several=st.lists(contents, min_size=1, max_size=3),
        activate=st.booleans(),
        pin=st.sampled_from((False, False, True)),
    )
    def register(self, name: str, several: list[int], activate: bool, pin: bool) -> None:
        for content in several:
            self._register(name, content, activate, pin)

    @rule(pick=picks, version=picks)
    def route(self, pick: int, version: int) -> None:
        name, number = self._name(pick), self._version(pick, version)
        path = f"/admin/adapters/{name}/route"
        self._change(lambda e: e.set_route(name, number, None), "PUT", path, {"version": number})

    @rule(pick=picks, version=st.none() | picks, canary=picks, percent=percents)
    def canary(self, pick: int, version: int | None, canary: int, percent: float) -> None:
        name, new = self._name(pick), self._version(pick, canary)
        number = None if version is None else self._version(pick, version)
        body = {"version": number, "canary": {"version": new, "percent": percent}}
        path = f"/admin/adapters/{name}/route"
        self._change(lambda e: e.set_route(name, number, (new, percent)), "PUT", path, body)
        for user in (*USERS, *USERS):
            self._ask(name, user)

    @precondition(lambda self: any(adapter.canary for adapter in self.expected.adapters.values()))
    @rule(percent=percents)
    def grow_canary(self, percent: float) -> None:
        """All users before, again, and after: they stay, and whoever had the canary keeps it while it grows."""
        name, adapter = next((n, a) for n, a in sorted(self.expected.adapters.items()) if a.canary is not None)
        assert adapter.canary is not None
        for user in (*USERS, *USERS):
            self._ask(name, user)
        new = adapter.canary[0]
        body = {"canary": {"version": new, "percent": percent}}
        path = f"/admin/adapters/{name}/route"
        self._change(lambda e: e.set_route(name, None, (new, percent)), "PUT", path, body)
        for user in USERS:
            self._ask(name, user)

    @rule(pick=picks)
    def roll_back(self, pick: int) -> None:
        self._roll_back(self._name(pick))

    @precondition(lambda self: self._routed())
    @rule(pick=picks)
    def roll_back_what_was_routed(self, pick: int) -> None:
        routed = self._routed()
        self._roll_back(routed[pick % len(routed)])

    @rule(pick=picks, version=picks)
    def delete_version(self, pick: int, version: int) -> None:
        name, number = self._name(pick), self._version(pick, version)
        path = f"/admin/adapters/{name}?version={number}"
        self._change(lambda e: e.delete(name, number), "DELETE", path)

    @rule(pick=picks)
    def delete(self, pick: int) -> None:
        name = self._name(pick)
        self._change(lambda e: e.delete(name, None), "DELETE", f"/admin/adapters/{name}")

    @rule(alias=st.sampled_from(ALIASES), call=calls)
    def set_alias(self, alias: str, call: Call) -> None:
        meaning = self._called(call)
        body = {"target": self._on_the_wire(meaning)}
        self._change(lambda e: e.set_alias(alias, meaning), "PUT", f"/admin/aliases/{alias}", body)

    @precondition(lambda self: self.expected.aliases)
    @rule(alias=st.sampled_from(ALIASES))
    def remove_alias(self, alias: str) -> None:
        self._change(lambda e: e.remove_alias(alias), "DELETE", f"/admin/aliases/{alias}")

    @rule(pick=picks, verb=st.sampled_from(("pin", "unpin")))
    def pin(self, pick: int, verb: str) -> None:
        name = self._name(pick)
        self._change(lambda e: e.set_pinned(name, verb == "pin"), "POST", f"/admin/adapters/{name}/{verb}")

    @rule()
    def restart(self) -> None:
        program = next(self.turn)
        self._stop([program])
        program.start()

    # -- residency ---------------------------------------------------------------------------------------------

    @rule(pick=picks)
    def prefetch(self, pick: int) -> None:
        program, name = next(self.turn), self._name(pick)
        adapter = self.expected.adapters.get(name)
        reply = program.call("POST", f"/admin/adapters/{name}/prefetch")
        assert reply.status == (404 if adapter is None else 200), reply.text
        if adapter is not None and adapter.canary is None:
            assert reply.json["state"] == "on_device"

    @rule(pick=picks)
    def evict(self, pick: int) -> None:
        program, name = next(self.turn), self._name(pick)
        adapter = self.expected.adapters.get(name)
        if adapter is None:
            assert program.call("POST", f"/admin/adapters/{name}/evict").status == 404
            return
        if self.expected.pinned & self.expected.contents_of(name, adapter.routed):
            assert program.call("POST", f"/admin/adapters/{name}/evict").status == 409
            return
        ours = set(adapter.versions.values())
        call = functools.partial(program.call, "POST", f"/admin/adapters/{name}/evict")
        if ours & {stream.content for stream in self.streams}:
            self.waiting.append(self.threads.submit(call))
            return
        reply = call()
        assert reply.status == 200, reply.text
        left = {tier for version in reply.json["versions"] for tier in version["tiers"]}
        assert not left & {"host", "device"} or ours & self.expected.pinned

    # -- requests ----------------------------------------------------------------------------------------------

    @rule(call=calls, user=users | st.none())
    def ask(self, call: Call, user: str | None) -> None:
        self._ask(self._called(call), user)

    @rule(several=st.lists(st.tuples(calls, users), min_size=2, max_size=6))
    def ask_at_once(self, several: list[tuple[Call, str]]) -> None:
        questions = [(self._called(call), user) for call, user in several]
        futures = [self.threads.submit(self._send, next(self.turn), *question) for question in questions]
        for (name, user), future in zip(questions, futures, strict=True):
            self._check(future.result(), name, user, [self.expected.meaning_of(name, user)])

    @rule()
    def ask_the_base(self) -> None:
        reply = self._send(next(self.turn), BASE, None)
        assert reply.json["choices"][0]["text"] == BASE_LETTER * NUM_TOKENS

    @precondition(lambda self: len(self.streams) < 2 and self.expected.adapters)
    @rule(call=calls, user=users)
    def begin_stream(self, call: Call, user: str) -> None:
        name = self._called(call)
        allowed = self.expected.meaning_of(name, user)
        if allowed is None or not self._has_room(self.expected, self._contents(allowed)):
            return
        stream = HeldStream(next(self.turn), self._on_the_wire(name), user, next(self.seeds))
        self.streams.append(stream)
        (stream.content,) = self._contents({stream.meaning})
        assert stream.meaning in allowed
        assert stream.digest == self.digests[stream.content]
        self._learn(name, user, stream.meaning)

    @precondition(lambda self: self.streams)
    @rule(leave=st.booleans())
    def end_stream(self, leave: bool) -> None:
        stream = self.streams.pop(0)
        stream.leave() if leave else stream.finish()
        self._end_waiting()


class SharedRegistryMachine(RegistryMachine):
    """Two servers on one registry in Redis; every call goes to either in turn."""

    num_programs = 2


def _settings(num_examples: int, num_steps: int) -> settings:
    return settings(
        max_examples=num_examples,
        stateful_step_count=num_steps,
        database=None,
        suppress_health_check=list(HealthCheck),
        # Shrinking starts servers by the hundred: only where somebody waits for the shortest sequence.
        phases=(Phase.generate,) if settings().derandomize else (Phase.generate, Phase.shrink),
    )


@pytest.fixture(autouse=True)
def model() -> Iterator[None]:
    with our_model():
        yield


@pytest.mark.search
@pytest.mark.timeout(900)
def test_every_answer_comes_from_the_weights_that_its_name_means(tmp_path: Path) -> None:
    RegistryMachine.folder = tmp_path
    run_state_machine_as_test(RegistryMachine, settings=_settings(by_tier(2, 100), 40))


@pytest.mark.search
@pytest.mark.timeout(900)
def test_every_answer_of_either_replica_does(tmp_path: Path, redis_url: str) -> None:
    SharedRegistryMachine.folder = tmp_path
    SharedRegistryMachine.redis_url = redis_url
    run_state_machine_as_test(SharedRegistryMachine, settings=_settings(by_tier(1, 50), 25))
