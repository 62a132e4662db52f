"""A tenant as the web sees it: a name, and which adapters it may see."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whoever a request is for. Made by an `Authenticator` only, never from a field of the request."""

    name: str
    sees_all: bool = False  # may use and list every tenant's adapters

    def may_see(self, adapter_tenant: str) -> bool:
        """Whether an adapter of `adapter_tenant` exists at all for this tenant."""
        return self.sees_all or adapter_tenant == self.name


LOCAL_TENANT = Tenant("default", sees_all=True)  # authentication is off: one user, one machine
ADMIN_TENANT = Tenant("admin", sees_all=True)
