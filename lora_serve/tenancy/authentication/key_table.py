"""Secret -> Caller, and when each key was last used."""

from __future__ import annotations

from collections.abc import Mapping

from lora_serve.core.errors import AuthenticationError, WrongKeyError
from lora_serve.core.tenant import Caller, Role
from lora_serve.tenancy.directory.directory import Directory
from lora_serve.tenancy.directory.keys import EXPIRED, REVOKED, WRONG, id_in, opens


class KeyTable:
    """Asked on the event loop's thread for every request, so it only looks into the directory's snapshot."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self._uses: dict[str, float] = {}  # since they were last taken

    def caller(self, secret: str) -> Caller:
        """Raises AuthenticationError: why, only to whoever has the secret, else WrongKeyError."""
        state, now = self.directory.snapshot, self.directory.clock()
        key = state.keys.get(id_in(secret) or "")
        if not opens(key, secret) or key is None:
            raise WrongKeyError(WRONG)
        tenant = state.tenants.get(key.tenant)
        if key.revoked is not None or tenant is None:
            raise AuthenticationError(REVOKED)
        if not key.is_valid(now):
            raise AuthenticationError(EXPIRED)
        self._uses[key.id] = now
        is_admin = key.role is Role.ADMIN
        may_use_base = tenant.may_use_base or is_admin
        return Caller(
            key.tenant, key.role, key.id, tenant.quota, key.quota, may_use_base, is_admin, since=tenant.created
        )

    def last_used(self, key_id: str) -> float | None:
        """Unix seconds; None: never. Of uses at other replicas it may be a minute old."""
        known = [self._uses.get(key_id), self.directory.snapshot.last_used(key_id)]
        return max((time for time in known if time is not None), default=None)

    def take_uses(self) -> dict[str, float]:
        """Those noted since the last time, for the directory."""
        uses, self._uses = self._uses, {}
        return uses

    def give_back(self, uses: Mapping[str, float]) -> None:
        """They could not be written."""
        self._uses = {**uses, **self._uses}
