"""A wall clock that somebody sets, forward and back: limits, keys, the audit log and usage mean what they meant."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.canary.asking import Canaries
from tests.canary.house import House
from tests.canary.questions import BASE
from tests.canary.watch import Watch, watching
from tests.faults.injecting import ask, settle
from tests.hostile.sending import as_admin, post

pytestmark = pytest.mark.engines("thread", nightly=["process"])
JUMPS = {"a_day_on": 86_400.0, "a_day_back": -86_400.0, "1980": -1.46e9, "2150": 4e9}
HOUR = 3600.0


class Clock:
    """Unix seconds, and what somebody added to them."""

    def __init__(self) -> None:
        self.offset = 0.0
        self._sound = time.time

    def __call__(self) -> float:
        return self._sound() + self.offset


@pytest.fixture
def clock(house: House, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """Of all that looks at it in this house; true again afterwards."""
    clock, services = Clock(), house.services
    monkeypatch.setattr(time, "time", clock)
    monkeypatch.setattr(services.quotas._limiter, "_clock", clock)
    monkeypatch.setattr(services.keys.directory, "clock", clock)
    monkeypatch.setattr(services.meter, "_clock", clock)
    monkeypatch.setattr(services.audit._journal, "_clock", clock)
    yield clock
    clock.offset = 0.0


def new_key(house: House, watch: Watch, tenant: str, **fields: Any) -> dict[str, str]:
    """Headers of a key that was just made."""
    assert as_admin(house, "POST", "/admin/tenants", {"name": tenant}).status in (201, 409)
    reply = as_admin(house, "POST", f"/admin/tenants/{tenant}/keys", {"label": "clock", **fields})
    assert reply.status == 201, reply.body
    watch.secrets.append(reply.json["secret"])
    return {"Authorization": f"Bearer {reply.json['secret']}"}


def status(house: House, key: dict[str, str]) -> int:
    body = {"model": BASE, "prompt": "what time is it", "max_tokens": 2, "ignore_eos": True}
    return post(house, "/v1/completions", body, key).status


@pytest.mark.parametrize("jump", JUMPS)
def test_limits_per_minute_hold_after_a_jump_and_keep_nobody_out(
    house: House, canaries: Canaries, clock: Clock, jump: str
) -> None:
    with watching(house, canaries) as watch:
        key = new_key(house, watch, "timed", quota={"requests_per_minute": 2})
        assert [status(house, key) for _ in range(3)] == [200, 200, 429]
        clock.offset = JUMPS[jump]
        assert [status(house, key) for _ in range(3)] == [200, 200, 429]
        clock.offset = 0.0
        assert status(house, key) == 429  # nothing of the true minute was forgotten


@pytest.mark.parametrize("jump", ["a_day_on", "2150"])
def test_key_that_expires_is_dead_while_the_clock_says_so_and_no_longer(
    house: House, canaries: Canaries, clock: Clock, jump: str
) -> None:
    with watching(house, canaries) as watch:
        key = new_key(house, watch, "timed", expires_in=int(HOUR))
        assert status(house, key) == 200
        clock.offset = JUMPS[jump]
        assert status(house, key) == 401
        clock.offset = -JUMPS["a_day_on"]
        assert status(house, key) == 200
        clock.offset = 0.0
        assert status(house, key) == 200


@pytest.mark.parametrize("jump", JUMPS)
def test_usage_and_audit_log_lose_nothing(house: House, canaries: Canaries, clock: Clock, jump: str) -> None:
    with watching(house, canaries) as watch:
        tenant = f"timed-{jump}"  # what is counted in 1980 is soon too old to be kept
        key = new_key(house, watch, tenant)
        assert status(house, key) == 200
        house.on_loop(house.services.meter.flush())
        clock.offset = JUMPS[jump]
        assert status(house, key) == 200
        house.on_loop(house.services.meter.flush())
        settle(lambda: num_requests(house, tenant) == 2)  # counted once the answer has gone out
        assert as_admin(house, "PUT", "/admin/aliases/now", {"target": "acme/a"}).status < 300
        assert as_admin(house, "DELETE", "/admin/aliases/now").status < 300
        clock.offset = 0.0
    lines = as_admin(house, "GET", "/admin/audit?limit=50").json["data"]
    assert [line["time"] for line in lines] == sorted((line["time"] for line in lines), reverse=True)
    assert not list(house.services.audit._journal.broken())


def num_requests(house: House, tenant: str) -> int:
    """Over all time."""
    rows, is_complete = house.on_loop(house.services.meter.rows(0, 2**40))
    assert is_complete
    return sum(figures.requests for _, key, figures in rows if key.tenant == tenant)


@pytest.mark.parametrize("jump", JUMPS)
def test_deadlines_and_loads_are_measured_by_a_clock_that_nobody_sets(
    house: House, canaries: Canaries, clock: Clock, jump: str
) -> None:
    with watching(house, canaries):
        clock.offset = JUMPS[jump]
        for tenant in ("acme", "globex", "hooli"):
            assert ask(house, f"{tenant}/b", timeout_ms=60_000).status == 200
