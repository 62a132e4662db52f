"""Wrong keys are counted by address, in bounded memory, and said once."""

from __future__ import annotations

import logging

import pytest

from lora_serve.core.errors import WrongKeysError
from lora_serve.tenancy import authenticator
from lora_serve.tenancy.authenticator import WrongKeys, site_of


class Clock:
    now = 600.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def send(keys: WrongKeys, count: int, address: str = "10.0.0.1") -> int:
    """How many of them were refused with a time to come back."""
    refused = 0
    for _ in range(count):
        try:
            keys.note(address)
        except WrongKeysError:
            refused += 1
    return refused


def test_so_many_are_told_that_they_are_wrong_and_more_to_come_later(clock: Clock) -> None:
    keys = WrongKeys(20, clock)
    assert send(keys, 2400) == 2380
    with pytest.raises(WrongKeysError) as refusal:
        keys.note("10.0.0.1")
    assert 0 < refusal.value.retry_after <= 120
    clock.now += refusal.value.retry_after
    assert send(keys, 1) == 0, "after that time there is room"


def test_minute_slides(clock: Clock) -> None:
    clock.now = 659.9
    keys = WrongKeys(20, clock)
    assert send(keys, 20) == 0
    clock.now = 660.1
    assert send(keys, 20) == 20, "the turn of a minute gives nobody two"
    clock.now = 690.0
    assert send(keys, 20) == 10
    clock.now = 900.0
    assert send(keys, 20) == 0


def test_addresses_do_not_count_for_one_another(clock: Clock) -> None:
    keys = WrongKeys(20, clock)
    assert send(keys, 30) == 10
    assert send(keys, 20, "10.0.0.2") == 0


def test_memory_is_bounded_and_the_last_are_remembered(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authenticator, "MAX_ADDRESSES", 100)
    keys = WrongKeys(1, clock)
    for number in range(1000):
        keys.note(f"10.0.{number >> 8}.{number & 255}")
    assert len(keys._counts) == 100
    assert send(keys, 1, "10.0.3.231") == 1
    assert send(keys, 1, "10.0.0.0") == 0, "forgotten"


def test_it_is_said_once_a_minute(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    keys = WrongKeys(20, clock)
    with caplog.at_level(logging.WARNING):
        send(keys, 500)
    assert [record.message.split(";")[0] for record in caplog.records] == [
        "20 wrong keys within a minute from 10.0.0.1"
    ]


def test_zero_is_no_limit(clock: Clock) -> None:
    assert send(WrongKeys(0, clock), 1000) == 0


@pytest.mark.parametrize(
    ("address", "site"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("", ""),
    ],
)
def test_one_customers_addresses_are_one(address: str, site: str) -> None:
    assert site_of(address) == site
