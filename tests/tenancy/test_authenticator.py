"""Who may enter."""

from __future__ import annotations

import logging

import pytest

from lora_serve.core.errors import AuthenticationError, ForbiddenError, WrongKeysError
from lora_serve.core.tenant import Caller, Role, is_visible
from lora_serve.tenancy import authenticator
from lora_serve.tenancy.admin_key import AdminKey
from lora_serve.tenancy.authenticator import Authenticator, WrongKeys, auth_required, site_of

KEY = AdminKey.of("right-key")
WRONG = [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic right-key", "right-key", "Bearer right-key-and-more"]


@pytest.mark.parametrize(
    ("auth", "host", "required"),
    [
        ("auto", "127.0.0.1", False),
        ("auto", "127.8.8.8", False),
        ("auto", "::1", False),
        ("auto", "localhost", False),
        ("auto", "0.0.0.0", True),
        ("auto", "::", True),
        ("auto", "192.168.1.5", True),
        ("auto", "example.org", True),
        ("auto", "", True),
        ("on", "127.0.0.1", True),
        ("off", "0.0.0.0", False),
    ],
)
def test_inference_is_open_on_loopback_only_unless_said_otherwise(auth: str, host: str, required: bool) -> None:
    assert auth_required(auth, host) is required


@pytest.mark.parametrize("header", WRONG)
def test_wrong_keys_are_refused(header: str | None) -> None:
    authenticator = Authenticator(KEY, required=True)
    with pytest.raises(AuthenticationError):
        authenticator.inference(header)
    with pytest.raises(AuthenticationError):
        authenticator.admin(header)


@pytest.mark.parametrize("header", ["Bearer right-key", "bearer  right-key "])
def test_right_key_opens_both(header: str) -> None:
    authenticator = Authenticator(KEY, required=True)
    assert authenticator.inference(header).sees_all
    assert authenticator.admin(header).sees_all


@pytest.mark.parametrize("header", WRONG)
def test_admin_needs_the_key_even_where_inference_is_open(header: str | None) -> None:
    authenticator = Authenticator(KEY, required=False)
    assert authenticator.inference(header).tenant == "default"
    with pytest.raises(AuthenticationError):
        authenticator.admin(header)


def test_clients_key_opens_inference_and_nothing_else() -> None:
    """--api-key, as in vLLM: every model and adapter, and no admin."""
    guard = Authenticator(AdminKey.of("the-admin-key"), True, None, (AdminKey.of("one"), AdminKey.of("two")))
    for secret in ("one", "two"):
        caller = guard.inference(f"Bearer {secret}")
        assert (caller.role, caller.sees_all, caller.may_use_base) == (Role.INFERENCE, True, True)
        for admits in (guard.admin, guard.managing):
            with pytest.raises(ForbiddenError):
                admits(f"Bearer {secret}")
    with pytest.raises(AuthenticationError):
        guard.inference("Bearer three")


def test_tenant_sees_its_own_adapters_only() -> None:
    assert is_visible("acme", (), Caller("acme").scope)
    assert not is_visible("globex", (), Caller("acme").scope)
    assert is_visible("globex", (), Caller("default", sees_all=True).scope)


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
