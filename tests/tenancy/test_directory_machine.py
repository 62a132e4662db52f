"""The directory driven at random, from two replicas that do not always know of one another's last edit: whatever was
done, a secret opens what a model in plain Python says it must open, and nothing else.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, multiple, rule, run_state_machine_as_test

from lora_serve.adapters.catalog.journals.sqlite import SqliteJournal
from lora_serve.core.errors import AuthenticationError, ConflictError, NotFoundError
from lora_serve.core.tenant import Role
from lora_serve.tenancy.authenticator import KeyTable
from lora_serve.tenancy.directory import Directory
from tests.tiers import num_examples

NAMES = st.sampled_from(("acme", "globex", "initech"))
REPLICAS = st.integers(0, 1)


@dataclass
class Key:
    """What the model knows of a key."""

    id: str
    tenant: str
    role: Role
    expires: float | None
    is_alive: bool = True


class DirectoryMachine(RuleBasedStateMachine):
    secrets = Bundle("secrets")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.now = 1_800_000_000.0
        self.journal = SqliteJournal(Path(self.folder.name) / "tenants.sqlite3")
        self.replicas = [Directory(self.journal, lambda: self.now) for _ in range(2)]
        self.tenants: dict[str, bool] = {}
        self.keys: dict[str, Key] = {}

    @rule(at=REPLICAS, name=NAMES, base=st.booleans())
    def create_tenant(self, at: int, name: str, base: bool) -> None:
        is_new = name not in self.tenants
        try:
            self.replicas[at].create_tenant(name, may_use_base=base)
        except ConflictError:
            if not is_new:
                return
            self.replicas[at].refresh()  # it had not heard that the old one is gone
            self.replicas[at].create_tenant(name, may_use_base=base)
        assert is_new
        self.tenants[name] = base

    @rule(at=REPLICAS, name=NAMES)
    def delete_tenant(self, at: int, name: str) -> None:
        assert self.replicas[at].delete_tenant(name) == (name in self.tenants)
        self.tenants.pop(name, None)
        for key in self.keys.values():
            key.is_alive = key.is_alive and key.tenant != name

    @rule(at=REPLICAS, name=NAMES)
    def refuse_a_key_of_nobody(self, at: int, name: str) -> None:
        if name not in self.tenants:
            with pytest.raises(NotFoundError):
                self.replicas[at].create_key(name, Role.INFERENCE)

    @rule(target=secrets, at=REPLICAS, name=NAMES, role=st.sampled_from(Role), life=st.none() | st.integers(1, 50))
    def create_key(self, at: int, name: str, role: Role, life: int | None):  # type: ignore[no-untyped-def]
        if name not in self.tenants:
            return multiple()
        self.replicas[at].refresh()
        expires = None if life is None else self.now + life
        key, secret = self.replicas[at].create_key(name, role, expires=expires)
        self.keys[secret] = Key(key.id, name, role, expires)
        return secret

    @rule(at=REPLICAS, secret=secrets)
    def revoke(self, at: int, secret: str) -> None:
        key = self.keys[secret]
        with suppress(NotFoundError):
            self.replicas[at].revoke_key(key.tenant, key.id)
        self.replicas[at].refresh()
        with suppress(NotFoundError):
            self.replicas[at].revoke_key(key.tenant, key.id)
        key.is_alive = False

    @rule(at=REPLICAS, secret=secrets)
    def note_use(self, at: int, secret: str) -> None:
        self.replicas[at].note_uses({self.keys[secret].id: self.now})

    @rule(seconds=st.integers(1, 30))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def forget(self) -> None:
        self.replicas[0].ledger.forget()

    @rule(at=REPLICAS)
    def look(self, at: int) -> None:
        """Once it heard of all, every secret opens what it must."""
        replica = self.replicas[at]
        replica.refresh()
        table = KeyTable(replica)
        assert {name: tenant.may_use_base for name, tenant in replica.snapshot.tenants.items()} == self.tenants
        for secret, key in self.keys.items():
            is_open = key.is_alive and (key.expires is None or self.now < key.expires)
            try:
                caller = table.caller(secret)
            except AuthenticationError:
                assert not is_open
            else:
                assert is_open
                assert (caller.tenant, caller.role, caller.key_id) == (key.tenant, key.role, key.id)
                assert caller.sees_all == (key.role is Role.ADMIN)
        used = {key_id for times in replica.snapshot.used.values() for key_id in times}
        assert used <= replica.snapshot.keys.keys()

    def teardown(self) -> None:
        for at in range(2):
            self.look(at)
        self.journal.close()
        self.folder.cleanup()


@pytest.mark.search
def test_secrets_open_what_the_model_says() -> None:
    run_state_machine_as_test(
        DirectoryMachine,
        settings=settings(max_examples=num_examples() // 3, stateful_step_count=25),
    )
