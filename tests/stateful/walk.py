"""One random walk: the program, what it is expected to be, and the steps' common ground. The rules are in the test."""

from __future__ import annotations

import copy
import itertools
import shutil
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine, invariant

from lora_serve.adapters.checkpoint.content import adapter_digest
from lora_serve.adapters.stores.redis import RedisStore
from tests.e2e.plain_http import Reply
from tests.stateful.expected import Expected, Meaning
from tests.stateful.letters import LETTERS, write_adapter
from tests.stateful.program import Program, eventually
from tests.stateful.shown import blobs, expected_cards, shown_aliases, shown_cards, wrong_tiers
from tests.stateful.streams import PROMPT, HeldStream

NAMES = ("acme/a", "acme/b", "c")
ALIASES = ("live", "acme/next", "c")  # the last is an id, too
MISSING = 12  # a pick of what is not there
NUM_CONTENTS, NUM_TOKENS, MAX_LORAS = 6, 3, 3
GONE = "The model `{}` does not exist or you do not have access to it."
Call = tuple[str, int, str, int]  # "id" or "alias", which, a kind of selector, which


class Walk(RuleBasedStateMachine):
    """Names are `id`, `id@3` or `id@content:2`; on the wire the last is `id@sha256:...` of that content."""

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
                self._nothing_else_is_kept()
        finally:
            for program in self.programs:
                program.close()
            self.threads.shutdown()
            shutil.rmtree(self.home)

    # -- what must always be so --------------------------------------------------------------------------------

    @invariant()
    def everything_is_as_expected(self) -> None:
        aliases = {alias: self._on_the_wire(target) for alias, target in self.expected.aliases.items()}
        self._wait_until_all_know()
        for program in self.programs:
            assert shown_aliases(program) == aliases
            eventually(lambda p=program: not self._wrong_tiers(p), lambda p=program: self._wrong_tiers(p))
        assert self._named() <= self._kept(), "the bytes of a version are gone"
        if self.redis_url is None:  # replicas leave one another a moment of grace, which is waited for at the end
            self._nothing_else_is_kept()

    # ----------------------------------------------------------------------------------------------------------

    def _wait_until_all_know(self) -> None:
        """A replica may be two seconds behind another."""
        cards = expected_cards(self.expected, self.digests)
        for program in self.programs:
            eventually(lambda p=program: shown_cards(p) == cards, lambda p=program: f"{shown_cards(p)} != {cards}")

    def _name(self, pick: int) -> str:
        known = sorted(self.expected.adapters)
        return NAMES[pick % len(NAMES)] if pick == MISSING or not known else known[pick % len(known)]

    def _version(self, pick: int, version: int) -> int:
        adapter = self.expected.adapters.get(self._name(pick))
        return 9 if adapter is None or version == MISSING else sorted(adapter.versions)[version % len(adapter.versions)]

    def _called(self, call: Call) -> str:
        kind, pick, selector, which = call
        aliases = sorted(self.expected.aliases) or ALIASES
        name = aliases[pick % len(aliases)] if kind == "alias" else self._name(pick)
        if not selector:
            return name
        if selector == "@":
            return f"{name}@{self._version(pick, which)}"
        adapter = self.expected.adapters.get(name)
        known = list(range(NUM_CONTENTS)) if adapter is None or which == MISSING else [*adapter.versions.values()]
        return f"{name}@content:{known[which % len(known)]}"

    def _register(self, name: str, content: int, activate: bool, pin: bool) -> None:
        body = {"id": name, "source": str(self.sources[content]), "activate": activate, "pin": pin}
        self._change(lambda e: e.register(name, content, activate, pin), "POST", "/admin/adapters", body)

    def _roll_back(self, name: str) -> None:
        self._change(lambda e: e.roll_back(name), "POST", f"/admin/adapters/{name}/rollback")

    def _routed(self) -> list[str]:
        """Ids that can be rolled back, those with a canary if there are any."""
        adapters = sorted(self.expected.adapters.items())
        canaries = [name for name, adapter in adapters if adapter.canary is not None]
        return canaries or [name for name, adapter in adapters if adapter.history]

    def _ask(self, name: str, user: str | None) -> None:
        reply = self._send(next(self.turn), name, user)
        self._check(reply, name, user, [self.expected.meaning_of(name, user)])

    def _change(self, change: Callable[[Expected], int], method: str, path: str, body: Any = None) -> None:
        """Make a change in the model and by HTTP, while a request for each id is under way."""
        after = copy.deepcopy(self.expected)
        status = change(after)
        if not self._has_room(after):
            return
        before, self.expected = self.expected, after
        asked = [(name, self.threads.submit(self._send, next(self.turn), name, None)) for name in NAMES]
        reply = next(self.turn).call(method, path, body)
        assert reply.status == status, f"{reply.status} {reply.text}, not {status}"
        for name, future in asked:
            self._check(future.result(), name, None, [before.meaning_of(name), after.meaning_of(name)], before)
        if self.num_programs > 1:
            self._wait_until_all_know()

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
                with suppress(ConnectionError):  # the server had stopped before it read the request
                    assert future.result().status in (200, 404, 503)  # 404: deleted meanwhile; 503: stopped meanwhile
            self.waiting = []

    # -- bytes -------------------------------------------------------------------------------------------------

    def _named(self) -> set[str]:
        return {self.digests[content] for content in self.expected.named}

    def _kept(self) -> set[str]:
        """Digests in the store; with a shared registry, in Redis."""
        if self.redis_url is None:
            return blobs(self.programs[0])
        with closing(RedisStore(self.redis_url, f"{self.programs[0].settings.redis_prefix}:adapters:")) as store:
            return set(store.digests())

    def _strays(self) -> set[str]:
        """Digests that nobody needs, on disk or in Redis."""
        held = {stream.digest for stream in self.streams}
        return self._kept().union(*(blobs(program) for program in self.programs)) - self._named() - held

    def _nothing_else_is_kept(self) -> None:
        eventually(lambda: not self._strays(), lambda: f"bytes that nothing needs: {self._strays()}")

    def _wrong_tiers(self, program: Program) -> str:
        held = {stream.digest for stream in self.streams if stream.program is program}
        pinned = {self.digests[content] for content in self.expected.pinned}
        return wrong_tiers(program, dict(zip(self.digests, LETTERS, strict=False)), self._named(), pinned, held)
