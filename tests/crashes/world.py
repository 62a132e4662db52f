"""What servers must know after all that they acknowledged: the registry's model, with tenants, keys, usage and acts."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.crashes.crashing import Act
from tests.stateful.history import Shared

ACTIONS = {  # as the web notes them
    "POST /admin/adapters": "register",
    "PUT /admin/adapters/{id}/route": "set_route",
    "POST /admin/adapters/{id}/rollback": "roll_back",
    "DELETE /admin/adapters/{id}": "delete",
    "PUT /admin/aliases/{id}": "set_alias",
    "DELETE /admin/aliases/{id}": "remove_alias",
    "POST /admin/adapters/{id}/pin": "set_pinned",
    "POST /admin/adapters/{id}/unpin": "set_pinned",
    "PUT /admin/adapters/{id}/sharing": "share",
    "POST /admin/tenants": "create_tenant",
    "DELETE /admin/tenants/{tenant}": "delete_tenant",
    "POST /admin/tenants/{tenant}/keys": "create_key",
    "DELETE /admin/tenants/{tenant}/keys/{key}": "revoke_key",
}
UNNOTED = ("meter", "use_key")


@dataclass
class Key:
    """`is_known`: its secret was told to somebody."""

    tenant: str
    is_open: bool = True
    is_there: bool = True
    is_known: bool = True


@dataclass
class World(Shared):
    """All that was acknowledged; `usage`, `audit` and `hot` are the store's `here`, one of those that share a registry.
    As in `Expected`, an act returns the status that it must get.
    """

    here: int = 0
    checks_tenants: bool = False  # the web shares with tenants that there are, and no others
    tenants: set[str] = field(default_factory=set)
    keys: list[Key] = field(default_factory=list)
    usage: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    audit: dict[int, list[list[Any]]] = field(default_factory=lambda: defaultdict(list))
    hot: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def act(self, act: Act) -> int:
        status = int(getattr(self, act[0])(*act[1:]))
        if act[0] not in UNNOTED:
            self.audit[self.here].append([act[0], json.dumps(act[1:]), status])
        return status

    def share(self, name: str, tenants: list[str]) -> int:
        if self.checks_tenants and not self.tenants.issuperset(tenants):
            return 400
        return super().share(name, tenants)

    def create_tenant(self, tenant: str) -> int:
        if tenant in self.tenants:
            return 409
        self.tenants.add(tenant)
        return 201

    def delete_tenant(self, tenant: str) -> int:
        was_there = tenant in self.tenants or any(name.startswith(f"{tenant}/") for name in self.adapters)
        super().delete_tenant(tenant)
        self.tenants.discard(tenant)
        for key in self.keys:
            if key.tenant == tenant:
                key.is_open = key.is_there = False
        return 200 if was_there else 404

    def create_key(self, tenant: str) -> int:
        if tenant not in self.tenants:
            return 404
        self.keys.append(Key(tenant))
        return 201

    def revoke_key(self, number: int, tenant: str) -> int:
        key = [key for key in self.keys if key.is_known][number]
        if not key.is_there or key.tenant != tenant:
            return 404
        key.is_open = False
        return 200

    def use_key(self, number: int) -> int:
        return 200

    def meter(self, tenant: str, tokens: int) -> int:
        self.usage[self.here][tenant] += tokens
        return 200

    def note_hot(self) -> int:
        self.hot[self.here] = sorted(self.named)
        return 200

    def parts(self, digests: Sequence[str]) -> dict[str, Any]:
        """What is committed together, and shown as the process shows it."""
        known = [key for key in self.keys if key.is_known]
        return {
            "catalog": (self.shown(digests), self.shown_aliases(digests)),
            "directory": (
                sorted(self.tenants),
                [key.tenant if key.is_open else "" for key in known],
                sum(key.is_open for key in self.keys),
            ),
            "usage": dict(self.usage[self.here]),
            "hot": sorted(digests[content] for content in self.hot[self.here]),
            "audit": self.audit[self.here],
        }

    def take(self, part: str, other: World) -> None:
        fields = {"catalog": ("adapters", "aliases", "shared_with", "shares"), "directory": ("tenants", "keys")}
        for name in fields.get(part, (part,)):
            setattr(self, name, getattr(other, name))


def shown_parts(state: dict[str, Any], num_keys: int) -> dict[str, Any]:
    return {
        "catalog": (state["entries"], state["aliases"]),
        "directory": (state["tenants"], state["keys"][:num_keys], state["num_keys"]),
        "usage": state["usage"],
        "hot": sorted(state["hot"]),
        "audit": state["own_audit"],
    }
