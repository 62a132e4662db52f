"""Clients of several replicas at once, and the record of what each asked and was told."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from tests.consistency.linearizability import NEVER

ADMIN_KEY = "admin-key-of-the-tests"
PATIENCE = 30.0  # seconds for one answer
UNCLEAR = 1.0  # seconds; see World.an_act
BACK_OFF = 0.3  # seconds after an act of which nobody knows whether it was done
PROMPT = "Dear customer"
REFUSALS = (400, 404, 409)
Act = tuple[Any, ...]


@dataclass
class Observed:
    """One act. `answer` None and `returned` NEVER: nobody knows whether it was done."""

    kind: str
    name: str
    replica: int
    act: Act
    invoked: float
    returned: float = NEVER
    answer: Any = None
    status: int = 0
    gave_up: float = 0.0  # when the client was told that nobody knows


class Replica:
    """One server, as clients reach it."""

    def __init__(self, number: int, url: str) -> None:
        self.number = number
        self._address = urlsplit(url).netloc

    def ask(self, method: str, path: str, body: Any = None, key: str = ADMIN_KEY) -> tuple[int, Any, Mapping[str, str]]:
        """Status (0: no answer), body and headers."""
        connection = http.client.HTTPConnection(self._address, timeout=PATIENCE)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text) if text else None, answer.headers
        except (OSError, http.client.HTTPException, ValueError):
            return 0, None, {}
        finally:
            connection.close()


@dataclass
class Record:
    """All that was observed, by all clients; `trouble`: statuses that no promise allows."""

    observed: list[Observed] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    trouble: list[str] = field(default_factory=list)

    def add(self, one: Observed, status: int, answer: Any) -> bool:
        """Whether it is known what came of it. Looks of which nothing is known tell nothing."""
        self.statuses[status] += 1
        one.status = status
        if status in (0, 503) or status >= 500 or status == 429:
            if status not in (0, 503):
                self.trouble.append(f"{status}: {one}")
            one.gave_up = time.monotonic()
            if not is_look(one.act) and one.act[0] != "make":
                self.observed.append(one)
            return False
        one.returned, one.answer = time.monotonic(), answer
        self.observed.append(one)
        return True

    def save(self, path: Path) -> None:
        path.write_text("".join(json.dumps(asdict(one)) + "\n" for one in self.observed))


def is_look(act: Act) -> bool:
    return act[0] in ("show", "serve", "knock")


class World:
    """What may be done. `contents`: adapter folders; `digests`: theirs."""

    def __init__(self, replicas: Sequence[Replica], contents: Sequence[Path], digests: Sequence[str]) -> None:
        self.replicas, self.contents = replicas, contents
        self.number_of = {digest: number for number, digest in enumerate(digests)}
        self.record = Record()
        self.secrets: dict[str, tuple[str, str]] = {}  # key id -> (tenant, secret)
        self._aliases: dict[int, str] = {}
        self._unclear: dict[tuple[str, str], float] = {}  # until when an object is only looked at

    def prepare(self) -> None:
        """Ids of fixed contents for aliases."""
        for number in range(2):
            self._aliases[number] = f"fixed/{number}"
            body = {"id": f"fixed/{number}", "source": str(self.contents[number])}
            assert self.replicas[0].ask("POST", "/admin/adapters", body)[0] == 201

    def do(self, kind: str, name: str, act: Act, replica: Replica) -> bool:
        """Does it, and records it; False if nobody knows what came of it."""
        one = Observed(kind, name, replica.number, act, time.monotonic())
        status, answer = getattr(self, f"_{kind}")(name, act, replica, one)
        is_known = self.record.add(one, status, answer)
        if not is_known:
            self._unclear[kind, name] = one.gave_up + UNCLEAR
        return is_known

    def _adapter(self, name: str, act: Act, replica: Replica, one: Observed) -> tuple[int, Any]:
        path = f"/admin/adapters/{name}"
        match act:
            case ("register", content, activate):
                body = {"id": name, "source": str(self.contents[content]), "activate": activate}
                status, *_ = replica.ask("POST", "/admin/adapters", body)
            case ("set_route", version, None):
                status, *_ = replica.ask("PUT", f"{path}/route", {"version": version})
            case ("roll_back",):
                status, *_ = replica.ask("POST", f"{path}/rollback", {})
            case ("delete", version):
                status, *_ = replica.ask("DELETE", path + ("" if version is None else f"?version={version}"))
            case ("show",):
                status, card, _ = replica.ask("GET", path)
                if status != 200:
                    return status, None
                return status, (
                    tuple((row["version"], self.number_of[row["digest"]]) for row in card["versions"]),
                    card["version"],
                )
            case _:
                return self._served(name, replica)
        return status, status

    def _served(self, name: str, replica: Replica) -> tuple[int, Any]:
        body = {"model": name, "prompt": PROMPT, "max_tokens": 1}
        status, _, headers = replica.ask("POST", "/v1/completions", body)
        return status, self.number_of[headers["X-Adapter-Digest"]] if status == 200 else None

    def _alias(self, name: str, act: Act, replica: Replica, one: Observed) -> tuple[int, Any]:
        path = f"/admin/aliases/{quote(name)}"
        match act:
            case ("set", content):
                status, *_ = replica.ask("PUT", path, {"target": self._aliases[content]})
            case ("remove",):
                status, *_ = replica.ask("DELETE", path)
            case _:
                return self._served(name, replica)
        return status, status

    def _tenant(self, name: str, act: Act, replica: Replica, one: Observed) -> tuple[int, Any]:
        match act:
            case ("create",):
                status, *_ = replica.ask("POST", "/admin/tenants", {"name": name})
            case ("delete",):
                status, *_ = replica.ask("DELETE", f"/admin/tenants/{name}")
            case ("make", _):
                status, card, _ = replica.ask("POST", f"/admin/tenants/{name}/keys", {"role": "inference"})
                if status == 201:
                    one.act = ("make", card["id"])
                    self.secrets[card["id"]] = name, card["secret"]
            case ("revoke", key):
                status, *_ = replica.ask("DELETE", f"/admin/tenants/{name}/keys/{key}")
            case ("knock", key):
                status, *_ = replica.ask("GET", "/admin/whoami", key=self.secrets[key][1])
                return status, status == 200
        return status, status

    def an_act(self, draw: random.Random, kind: str, name: str) -> Act:
        """One that is likely to do something. After one of which nobody knows whether it was done come only looks for a
        while: whoever judges the record must try both.
        """
        content = draw.randrange(len(self.contents))
        keys = [key for key, (tenant, _) in list(self.secrets.items()) if tenant == name][-4:]
        a_key = draw.choice(keys) if keys else ""
        choices: dict[str, list[tuple[int, Act]]] = {
            "adapter": [
                (5, ("show",)),
                (5, ("serve",)),
                (3, ("register", content, draw.random() < 0.7)),
                (2, ("set_route", draw.randrange(1, 6), None)),
                (2, ("roll_back",)),
                (1, ("delete", draw.choice([None, draw.randrange(1, 6)]))),
            ],
            "alias": [(4, ("serve",)), (2, ("set", draw.randrange(2))), (1, ("remove",))],
            "tenant": [
                (2, ("create",)),
                (3, ("make", "")),
                *([(8, ("knock", a_key)), (2, ("revoke", a_key))] if keys else []),
                (1, ("delete",)) if draw.random() < 0.3 else (1, ("create",)),
            ],
        }
        acts = choices[kind]
        if time.monotonic() < self._unclear.get((kind, name), 0):
            acts = [(weight, act) for weight, act in acts if is_look(act)] or acts
        return draw.choices([act for _, act in acts], [weight for weight, _ in acts])[0]


class Clients:
    """Threads that act until the block ends; each with its own seed. `allowed`: acts that are left out otherwise."""

    def __init__(
        self,
        world: World,
        objects: Sequence[tuple[str, str]],
        seed: int,
        num_clients: int = 6,
        pause: float = 0.05,
        allowed: Callable[[str, Act], bool] = lambda kind, act: True,
    ) -> None:
        self._world, self._objects, self._pause, self._allowed = world, objects, pause, allowed
        self._is_over = threading.Event()
        self.failures: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed}-{number}"),))
            for number in range(num_clients)
        ]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, draw: random.Random) -> None:
        try:
            while not self._is_over.is_set():
                kind, name = draw.choice(self._objects)
                act = self._world.an_act(draw, kind, name)
                if self._allowed(kind, act):
                    is_known = self._world.do(kind, name, act, draw.choice(self._world.replicas))
                    self._is_over.wait(self._pause if is_known else BACK_OFF)
        except BaseException as error:  # told by whoever joins
            self.failures.append(error)
            raise
