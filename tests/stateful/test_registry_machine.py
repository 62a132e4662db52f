"""The registry as a whole, driven at random: whatever is registered, routed, deleted, evicted or restarted, every
answer comes from the weights that a model in plain Python says it must come from, and nothing else is kept.

LORA_SERVE_TEST_EXAMPLES=200 makes it run longer, with other sequences each time.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lora_serve.adapters.checkpoint.digest import adapter_digest
from tests.e2e.plain_http import Reply
from tests.stateful.expected import Expected, Meaning
from tests.stateful.letters import BASE_LETTER, LETTERS, write_adapter
from tests.stateful.program import BASE, Program, eventually, our_model
from tests.stateful.streams import PROMPT, HeldStream

NAMES = ("acme/a", "acme/b", "c")
ALIASES = ("live", "acme/next", "c")  # the last is an id, too
NUM_CONTENTS, NUM_TOKENS, MAX_LORAS = 6, 3, 3
GONE = "The model `{}` does not exist or you do not have access to it."

picks = st.integers(0, 7)  # of what there is; the last of them means what is not there
contents = st.integers(0, NUM_CONTENTS - 1)
users = st.sampled_from(("ann", "bob", "cy", "dee", "eve"))
percents = st.sampled_from((0.0, 20.0, 50.0, 80.0, 100.0))
calls = st.tuples(
    st.sampled_from(("id", "id", "alias")), picks, st.sampled_from(("", "", "@", "@content:")), picks
)  # kind, which, selector, which
Call = tuple[str, int, str, int]


class RegistryMachine(RuleBasedStateMachine):
    """Names in rules are `id`, `id@3` or `id@content:2`; on the wire the last is `id@sha256:...` of that content."""

    num_programs = 1
    redis_url: str | None = None
    folder: Path  # of this run
    _prefixes = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.expected = Expected()
        self.home = Path(tempfile.mkdtemp(dir=self.folder))
        self.sources = [write_adapter(self.home / "root" / LETTERS[number], number) for number in range(NUM_CONTENTS)]
        self.digests = [adapter_digest(source) for source in self.sources]
        self.threads = ThreadPoolExecutor(8)
        self.streams: list[HeldStream] = []
        self.waiting: list[Future[Reply]] = []  # evictions that wait for a stream
        self.seeds = itertools.count(1)
        prefix = f"machine-{next(self._prefixes)}"
        stores = [self.home / f"store-{number}" for number in range(self.num_programs)]
        self.programs = [Program(s, self.home / "root", MAX_LORAS, self.redis_url, prefix) for s in stores]
        self.turn = itertools.cycle(self.programs)
        for program in self.programs:
            program.start()

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:  # no step has failed
                self._stop(self.programs)
                for program in self.programs:
                    program.start()
                self.everything_is_as_expected()
        finally:
            for program in self.programs:
                program.close()
            self.threads.shutdown()
            shutil.rmtree(self.home)

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

    @precondition(lambda self: any(adapter.canary for adapter in self.expected.adapters.values()))
    @rule(percent=percents, user=users)
    def grow_canary(self, percent: float, user: str) -> None:
        """Of one user before and after: whoever had the canary keeps it while it grows."""
        name, adapter = next((n, a) for n, a in sorted(self.expected.adapters.items()) if a.canary is not None)
        assert adapter.canary is not None
        self._ask(name, user)
        new = adapter.canary[0]
        body = {"canary": {"version": new, "percent": percent}}
        path = f"/admin/adapters/{name}/route"
        self._change(lambda e: e.set_route(name, None, (new, percent)), "PUT", path, body)
        self._ask(name, user)

    @rule(pick=picks)
    def roll_back(self, pick: int) -> None:
        name = self._name(pick)
        self._change(lambda e: e.roll_back(name), "POST", f"/admin/adapters/{name}/rollback")

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
        assert left == {"disk"} or ours & self.expected.pinned

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

    # -- what must always be so --------------------------------------------------------------------------------

    @invariant()
    def everything_is_as_expected(self) -> None:
        for program in self.programs:
            eventually(lambda p=program: self._cards(p) == self._expected_cards(), lambda p=program: self._listed(p))
            aliases = {item["alias"]: item["target"] for item in program.call("GET", "/admin/aliases").json["data"]}
            assert aliases == {alias: self._on_the_wire(target) for alias, target in self.expected.aliases.items()}
            eventually(lambda p=program: not self._wrong_tiers(p), lambda p=program: self._wrong_tiers(p))
            assert self._named() <= _blobs(program) or self.redis_url, "the bytes of a version are gone"
        if self.redis_url is None:
            eventually(lambda: not self._stray_blobs(), lambda: f"blobs that nothing needs: {self._stray_blobs()}")

    # ----------------------------------------------------------------------------------------------------------

    def _name(self, pick: int) -> str:
        known = sorted(self.expected.adapters)
        return NAMES[pick % len(NAMES)] if pick == 7 or not known else known[pick % len(known)]

    def _version(self, pick: int, version: int) -> int:
        adapter = self.expected.adapters.get(self._name(pick))
        return 9 if adapter is None or version == 7 else sorted(adapter.versions)[version % len(adapter.versions)]

    def _called(self, call: Call) -> str:
        kind, pick, selector, which = call
        aliases = sorted(self.expected.aliases) or ALIASES
        name = aliases[pick % len(aliases)] if kind == "alias" else self._name(pick)
        if not selector:
            return name
        if selector == "@":
            return f"{name}@{self._version(pick, which)}"
        adapter = self.expected.adapters.get(name)
        known = list(range(NUM_CONTENTS)) if adapter is None or which == 7 else [*adapter.versions.values()]
        return f"{name}@content:{known[which % len(known)]}"

    def _register(self, name: str, content: int, activate: bool, pin: bool) -> None:
        body = {"id": name, "source": str(self.sources[content]), "activate": activate, "pin": pin}
        self._change(lambda e: e.register(name, content, activate, pin), "POST", "/admin/adapters", body)

    def _ask(self, name: str, user: str | None) -> None:
        reply = self._send(next(self.turn), name, user)
        self._check(reply, name, user, [self.expected.meaning_of(name, user)])

    def _change(
        self, change: Callable[[Expected], int], method: str, path: str, body: Any = None, load: int = 2
    ) -> None:
        """Make a change in the model and by HTTP, while `load` requests for each id are under way."""
        after = copy.deepcopy(self.expected)
        status = change(after)
        if not self._has_room(after):
            return
        before, self.expected = self.expected, after
        asked = [(name, self.threads.submit(self._send, next(self.turn), name, None)) for name in NAMES * load]
        reply = next(self.turn).call(method, path, body)
        assert reply.status == status, f"{reply.status} {reply.text}, not {status}"
        for name, future in asked:
            self._check(future.result(), name, None, [before.meaning_of(name), after.meaning_of(name)], before)

    def _has_room(self, after: Expected, more: set[int] = frozenset()) -> bool:
        """Whether a slot stays free beside what is pinned before or after and what streams hold."""
        held = {stream.content for stream in self.streams}
        return len(self.expected.pinned | after.pinned | held | more) < MAX_LORAS

    def _send(self, program: Program, name: str, user: str | None) -> Reply:
        body: dict[str, Any] = {"model": self._on_the_wire(name), "prompt": PROMPT, "max_tokens": NUM_TOKENS}
        return program.call("POST", "/v1/completions", body | ({} if user is None else {"user": user}))

    def _check(
        self,
        reply: Reply,
        name: str,
        user: str | None,
        allowed: list[Meaning | None],
        before: Expected | None = None,
    ) -> None:
        """The answer must be one of `allowed`, in its headers and in its letters."""
        if reply.status == 404:
            assert None in allowed, f"{name} is not there, and should be {allowed}"
            assert reply.json["error"]["message"] == GONE.format(self._on_the_wire(name))
            return
        assert reply.status == 200, f"{name}: {reply.status} {reply.text}"
        meaning = (reply.headers["X-Adapter-Id"], int(reply.headers["X-Adapter-Version"]))
        known = [each for each in (before, self.expected) if each is not None]
        possible = set().union(*(each for each in allowed if each is not None))
        assert meaning in possible, f"{name} for {user} was {meaning}, not one of {possible}"
        found = {e.adapters[meaning[0]].versions.get(meaning[1]) for e in known if meaning[0] in e.adapters}
        digest, text = reply.headers["X-Adapter-Digest"], reply.json["choices"][0]["text"]
        assert (digest, text) in {(self.digests[c], LETTERS[c] * NUM_TOKENS) for c in found if c is not None}
        if user is not None:
            self._learn(name, user, meaning)

    def _learn(self, name: str, user: str, meaning: tuple[str, int]) -> None:
        if "@" not in name + self.expected.aliases.get(name, ""):
            self.expected.learn(user, meaning)

    def _contents(self, meaning: Meaning) -> set[int]:
        return {self.expected.adapters[name].versions[version] for name, version in meaning}

    def _on_the_wire(self, name: str) -> str:
        first, found, content = name.partition("content:")
        return first + self.digests[int(content)] if found else name

    def _stop(self, programs: list[Program]) -> None:
        """Streams of these are drained: they end as they began."""
        for program in programs:
            program.begin_stop()
        ending = [stream for stream in self.streams if stream.program in programs]
        self.streams = [stream for stream in self.streams if stream not in ending]
        for stream in ending:
            stream.finish()
        for program in programs:
            program.end_stop()
        self._end_waiting()

    def _end_waiting(self) -> None:
        """Evictions whose streams have ended are answered; another may still have to wait."""
        if not self.streams:
            for future in self.waiting:
                assert future.result().status in (200, 404, 503)  # 404: deleted meanwhile; 503: stopped meanwhile
            self.waiting = []

    # -- what the program shows, in the model's words ----------------------------------------------------------

    def _listed(self, program: Program) -> str:
        return f"{json.dumps(self._cards(program), indent=1)} should be {json.dumps(self._expected_cards(), indent=1)}"

    def _cards(self, program: Program) -> list[Any]:
        cards = program.call("GET", "/admin/adapters").json["data"]
        return [
            [card[key] for key in ("id", "tenant", "pinned", "route", "aliases", "digest")]
            + [[[version["version"], version["digest"]] for version in card["versions"]]]
            for card in cards
        ]

    def _expected_cards(self) -> list[Any]:
        return [self._expected_card(name) for name in sorted(self.expected.adapters)]

    def _expected_card(self, name: str) -> list[Any]:
        adapter = self.expected.adapters[name]
        canary = adapter.canary and {"version": adapter.canary[0], "percent": adapter.canary[1]}
        return [
            name,
            name.partition("/")[0] if "/" in name else "default",
            adapter.pinned,
            {"version": adapter.route, "canary": canary, "history": adapter.history},
            sorted(alias for alias, target in self.expected.aliases.items() if target.partition("@")[0] == name),
            self.digests[adapter.versions[adapter.route]],
            [[number, self.digests[content]] for number, content in adapter.versions.items()],
        ]

    def _wrong_tiers(self, program: Program) -> str:
        """What device and host hold and should not, or do not and should; "" if all is well."""
        engine = program.call("GET", "/admin/engine").json
        slots = {slot["digest"] for slot in engine["slots"]}
        assert len({slot["index"] for slot in engine["slots"]}) == len(slots) == len(engine["slots"]) <= MAX_LORAS
        held = {self.digests[stream.content] for stream in self.streams if stream.program is program}
        assert held <= slots, "a running answer has lost its slot"
        needed = self._named() | held
        pinned = {self.digests[content] for content in self.expected.pinned}
        marked = {slot["digest"] for slot in engine["slots"] if slot["pinned"]}
        strays = (slots | set(engine["host_digests"])) - needed
        letters = {LETTERS[self.digests.index(digest)] for digest in slots}
        loaded = {letter for index, letter in list(program.runner.slots.items()) if index < MAX_LORAS}
        if strays or marked != pinned or loaded != letters:
            return f"strays {strays}; pinned {marked}, not {pinned}; in the pool {loaded}, not {letters}"
        return ""

    def _named(self) -> set[str]:
        return {self.digests[content] for content in self.expected.named}

    def _stray_blobs(self) -> set[str]:
        (program,) = self.programs
        return _blobs(program) - self._named() - {stream.digest for stream in self.streams}


def _blobs(program: Program) -> set[str]:
    folder = program.store / ("blobs" if program.settings.redis_url is None else "cache/blobs")
    return {f"sha256:{path.name}" for path in folder.iterdir()}


class SharedRegistryMachine(RegistryMachine):
    """Two servers on one registry in Redis; every call goes to either in turn."""

    num_programs = 2


def _settings(num_examples: int, num_steps: int) -> settings:
    longer = os.environ.get("LORA_SERVE_TEST_EXAMPLES")
    return settings(
        max_examples=int(longer) if longer else num_examples,
        stateful_step_count=num_steps,
        derandomize=longer is None,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink) if longer is None else (Phase.generate,),
    )


@pytest.fixture(autouse=True)
def model() -> Iterator[None]:
    with our_model():
        yield


@pytest.mark.timeout(3600)
def test_every_answer_comes_from_the_weights_that_its_name_means(tmp_path: Path) -> None:
    RegistryMachine.folder = tmp_path
    run_state_machine_as_test(RegistryMachine, settings=_settings(30, 30))


@pytest.mark.timeout(3600)
def test_every_answer_of_either_replica_does(tmp_path: Path, redis_url: str) -> None:
    SharedRegistryMachine.folder = tmp_path
    SharedRegistryMachine.redis_url = redis_url
    run_state_machine_as_test(SharedRegistryMachine, settings=_settings(6, 20))
