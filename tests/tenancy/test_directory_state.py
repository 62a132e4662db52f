"""Secrets: their form, and that comparing one costs the same whether the key is known or not."""

from __future__ import annotations

import hashlib
import hmac
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.tenant import ApiKey, Role
from lora_serve.tenancy import directory_state
from lora_serve.tenancy.directory_state import digest_of, id_in, new_secret, opens


def test_secret_names_its_id_and_holds_256_random_bits() -> None:
    made = [new_secret() for _ in range(200)]
    assert len({secret for _, secret in made}) == len({key_id for key_id, _ in made}) == 200
    for key_id, secret in made:
        assert re.fullmatch(r"ls-[a-z0-9]{12}-[A-Za-z0-9_-]{43}", secret)
        assert id_in(secret) == key_id


def test_digest_is_sha256_of_the_whole_secret() -> None:
    _, secret = new_secret()
    assert digest_of(secret) == hashlib.sha256(secret.encode()).hexdigest()


@given(st.text() | st.from_regex(r"ls-[a-z0-9]{10,14}-[\w-]{40,46}"))
def test_what_has_not_the_form_of_a_secret_names_no_key(text: str) -> None:
    found = id_in(text)
    assert (found is not None) == bool(re.fullmatch(r"ls-[a-z0-9]{12}-[A-Za-z0-9_-]{43}", text))


def test_key_opens_by_its_whole_secret_only() -> None:
    key_id, secret = new_secret()
    key = ApiKey(key_id, "acme", Role.INFERENCE, digest_of(secret))
    assert opens(key, secret)
    for wrong in (secret[:-1], secret + "a", f"ls-{key_id}-" + "A" * 43, key_id, "", secret.upper()):
        assert not opens(key, wrong)
    assert not opens(None, secret)


@pytest.mark.parametrize("is_known", [True, False])
def test_comparison_is_in_constant_time_and_made_even_for_an_unknown_key(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[int, int]] = []
    really_compare = hmac.compare_digest

    def compare(one: str, other: str) -> bool:
        compared.append((len(one), len(other)))
        return really_compare(one, other)

    monkeypatch.setattr(directory_state.hmac, "compare_digest", compare)
    key_id, secret = new_secret()
    key = ApiKey(key_id, "acme", Role.INFERENCE, digest_of("another")) if is_known else None
    assert not opens(key, secret)
    assert compared == [(64, 64)]


def test_record_does_not_show_its_digest_where_it_is_printed() -> None:
    assert digest_of("x") not in repr(ApiKey("a" * 12, "acme", Role.INFERENCE, digest_of("x")))
