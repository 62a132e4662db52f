"""Invariant 7 by the clock: what times tell of other tenants' prompts, keys and adapters is as good as nothing.

Times are of the processor, and taken in turns in an order of chance; half of the pairs right is a guess in the dark.
Beside each measurement stands one of a difference that is there, which the same measurement has to see.
"""

from __future__ import annotations

import itertools
import random
import string
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.adapters.catalog.journals.sqlite import SqliteJournal
from lora_serve.core.config import ServerConfig
from lora_serve.core.errors import AuthenticationError, LoraServeError
from lora_serve.core.tenant import Role
from lora_serve.tenancy import authenticator
from lora_serve.tenancy.admin_key import AdminKey
from lora_serve.tenancy.authenticator import Authenticator, KeyTable
from lora_serve.tenancy.directory import Directory
from lora_serve.tenancy.directory_state import new_secret
from tests.attempts import in_some_attempt
from tests.isolation.timing import MAX_AUC, answered_in_turns, auc, taken_in_turns, told
from tests.local_engine import LocalEngine
from tests.oracle import save_tiny_model
from tests.server.conftest import House
from tests.server.tenants import Tenancy, tenancy_of

PROMPT = 201  # tokens


def test_measure_sees_a_shift_and_finds_nothing_where_nothing_is() -> None:
    rng = np.random.default_rng(1)
    one, other, later = (rng.integers(1000, 2000, 5000) for _ in range(3))
    assert auc(np.array([1, 2]), np.array([3, 3])) == 1.0
    assert auc(np.array([1, 3]), np.array([3, 1])) == 0.5
    assert told(one, other).at_most < 0.53
    assert told(one, later + 60).auc > MAX_AUC
    assert told(later + 60, one).auc > MAX_AUC


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LocalEngine:
    sizes = {"hidden_size": 128, "intermediate_size": 512, "max_position_embeddings": 256}
    model = save_tiny_model("llama", tmp_path_factory.mktemp("timing") / "model", **sizes)
    return LocalEngine(model, block_size=4, kv_cache_memory="4MiB")


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_time_of_a_prompt_does_not_tell_that_another_tenant_sent_it(engine: LocalEngine) -> None:
    rng = random.Random(2)
    prompts: dict[str, list[int]] = {}

    def ask(tenant: str, prompt: str) -> Callable[[], object]:
        return lambda: engine.run([replace(engine.request(prompts[prompt], max_tokens=1), tenant=tenant)])

    def begin() -> None:
        prompts.update({name: [rng.randrange(3, 90) for _ in range(PROMPT)] for name in ("theirs", "own", "nobodys")})
        ask("acme", "theirs")()
        ask("globex", "own")()

    acts = {"theirs": ask("globex", "theirs"), "nobodys": ask("globex", "nobodys")}
    taken_in_turns(acts, 50, begin)
    times = taken_in_turns(acts, 5000, begin)
    found = told(times["theirs"], times["nobodys"])
    assert found.at_most < MAX_AUC, found
    seen = taken_in_turns({"own": ask("globex", "own"), "nobodys": ask("globex", "nobodys")}, 300, begin)
    assert told(seen["own"], seen["nobodys"]).auc > 0.9


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[tuple[Authenticator, list[str]]]:
    """An authenticator that knows a hundred keys, and their secrets."""
    with closing(Directory(SqliteJournal(tmp_path / "tenants.sqlite3"))) as directory:
        directory.create_tenant("acme")
        secrets = [directory.create_key("acme", Role.INFERENCE)[1] for _ in range(100)]
        yield Authenticator(AdminKey.of("the admin's own key"), True, KeyTable(directory)), secrets


def times_of(
    call: Callable[[str], object], texts: Mapping[str, Callable[[], str]], num_rounds: int
) -> dict[str, NDArray[np.int64]]:
    """Times of one and the same call that refuses texts of several kinds, others each time: where a text lies, how it
    is hashed, and by which function it was sent has its own times.
    """
    order, drawn, text = list(texts), dict[str, str](), ""

    def draw() -> None:
        made = {name: list(texts[name]()) for name in order}
        random.shuffle(order)
        drawn.update({name: "".join(made[name]) for name in order})  # all alike: what comes last is nearest at hand

    def prepare(name: str) -> None:
        nonlocal text
        text = drawn[name]

    def refuse() -> None:
        with suppress(LoraServeError):
            call(text)
            raise AssertionError("it was let in")

    acts = dict.fromkeys(texts, refuse)
    taken_in_turns(acts, 500, draw, prepare)
    return taken_in_turns(acts, num_rounds, draw, prepare)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_time_of_a_wrong_key_does_not_tell_how_much_of_it_is_right(
    keys: tuple[Authenticator, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    opener, secrets = keys
    rng = random.Random(3)

    texts = {
        "id alone": lambda: "Bearer " + rng.choice(secrets)[:16] + new_secret()[1][16:],
        "all but the last": lambda: "Bearer " + _otherwise(rng.choice(secrets), -1),
        "id is unknown": lambda: "Bearer " + new_secret()[1],
    }

    def look() -> None:
        times = times_of(opener.authenticate, texts, 20_000)
        found = told(times["id alone"], times["all but the last"])
        assert found.at_most < MAX_AUC, found

    in_some_attempt(look)
    plain = authenticator.opens
    monkeypatch.setattr(authenticator, "opens", lambda key, secret: key is not None and plain(key, secret))
    seen = times_of(opener.authenticate, texts, 2000)
    assert told(seen["id alone"], seen["id is unknown"]).auc > MAX_AUC, "no comparison for an unknown id"


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_time_of_a_wrong_admin_key_does_not_tell_how_much_of_it_is_right() -> None:
    key = new_secret()[1]
    admin = AdminKey.of(key)

    def enter(text: str) -> None:
        if not admin.matches(text):
            raise AuthenticationError("no")

    texts = {
        "first character": lambda: _otherwise(key, 0),
        "last character": lambda: _otherwise(key, -1),
        "all": lambda: new_secret()[1],
    }

    def look() -> None:
        times = times_of(enter, texts, 20_000)
        for one, other in itertools.combinations(texts, 2):
            found = told(times[one], times[other])
            assert found.at_most < MAX_AUC, (one, other, found)

    in_some_attempt(look)


def _otherwise(secret: str, place: int) -> str:
    """The secret with another character at a place."""
    letters = list(secret)
    letters[place] = random.choice([letter for letter in string.ascii_letters if letter != letters[place]])
    return "".join(letters)


@pytest.fixture
def auth_required() -> bool:
    return True


@pytest.fixture
def server_config(server_config: ServerConfig) -> ServerConfig:
    """Whoever comes with wrong keys may come again."""
    return replace(server_config, wrong_keys_per_minute=0)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
async def test_time_of_a_refusal_tells_neither_keys_nor_adapters(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole answers, in which the look-up itself, some 100 ns more for what is in memory, cannot be told."""
    catalog = house.services.catalog
    async with tenancy_of(house) as tenancy:
        for name in ("acme", "globex"):
            await tenancy.tenant(name)
        for name in ("hidden", "erased"):
            await house.register(f"globex/{name}", seed=1)
        await tenancy.call("admin", "DELETE", "/admin/adapters/globex/erased")
        await house.services.edit(lambda: catalog.set_alias("globex/called", "globex/hidden"), "alias")
        rng, secrets = random.Random(5), [await tenancy.key("acme", role="inference") for _ in range(20)]
        texts: dict[str, str] = {}

        def draw() -> None:  # outside what is measured, and both made alike
            for name, ids in (("there", secrets), ("not there", [new_secret()[1] for _ in secrets])):
                texts[name] = rng.choice(ids)[:16] + new_secret()[1][16:]

        def enter(name: str) -> Callable[[], Awaitable[object]]:
            return lambda: _answered(tenancy, texts[name], "/v1/models", 401)

        adapters = {
            name: partial(_answered, tenancy, "acme", f"/v1/models/globex/{name}", 404)
            for name in ("hidden", "erased", "called", "nobody")
        }
        asks: dict[str, Callable[[], Awaitable[object]]] = {
            **adapters,
            **{name: enter(name) for name in ("there", "not there")},
        }
        await answered_in_turns(asks, 200, draw)
        times = await answered_in_turns(asks, 5000, draw)
        for one, other in (("there", "not there"), *((name, "nobody") for name in ("hidden", "erased", "called"))):
            found = told(times[one], times[other])
            assert found.at_most < MAX_AUC, (one, found)
        monkeypatch.setattr(CatalogEntry, "is_visible_to", _slowly(CatalogEntry.is_visible_to))
        seen = await answered_in_turns({name: adapters[name] for name in ("hidden", "nobody")}, 1000)
        assert told(seen["hidden"], seen["nobody"]).auc > MAX_AUC


def _slowly(look: Callable[[CatalogEntry, str | None], bool]) -> Callable[[CatalogEntry, str | None], bool]:
    """The same with 50 microseconds more for an entry that is there."""

    def slow(entry: CatalogEntry, tenant: str | None) -> bool:
        until = time.thread_time_ns() + 50_000 * bool(entry.name)
        while time.thread_time_ns() < until:
            pass
        return look(entry, tenant)

    return slow


async def _answered(tenancy: Tenancy, key: str, path: str, status: int) -> None:
    assert (await tenancy.call(key, "GET", path)).status == status
