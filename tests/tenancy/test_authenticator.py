"""Who may enter."""

from __future__ import annotations

import pytest

from lora_serve.core.errors import AuthenticationError, ForbiddenError
from lora_serve.core.tenant import Caller, Role, is_visible
from lora_serve.tenancy.admin_key import AdminKey
from lora_serve.tenancy.authenticator import Authenticator, auth_required

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
