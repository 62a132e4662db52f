"""Authorization header -> Caller"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from lora_serve.core.errors import AuthenticationError, ForbiddenError, WrongKeyError
from lora_serve.core.tenant import ADMIN_CALLER, LOCAL_CALLER, Caller, Role
from lora_serve.tenancy.authentication.admin_key import AdminKey
from lora_serve.tenancy.authentication.key_table import KeyTable
from lora_serve.tenancy.directory.keys import WRONG

MISSING = "No API key was sent. Send it as a header: `Authorization: Bearer KEY`."


@dataclass(frozen=True, slots=True)
class Authenticator:
    """Who may call. `required`: inference needs a key too; the admin API needs one always.

    `keys`: of the tenants; None: the admin key is the only one there is.
    """

    admin_key: AdminKey
    required: bool
    keys: KeyTable | None = None

    def inference(self, authorization: str | None) -> Caller:
        """Who sends an inference request. Raises AuthenticationError."""
        return self.anybody(authorization) if self.required else LOCAL_CALLER

    def anybody(self, authorization: str | None) -> Caller:
        """Whose key it is. Raises AuthenticationError."""
        scheme, _, text = (authorization or "").partition(" ")
        secret = text.strip()
        if scheme.lower() != "bearer" or not secret:
            raise AuthenticationError(MISSING)
        if self.admin_key.matches(secret):
            return ADMIN_CALLER
        if self.keys is None:
            raise WrongKeyError(WRONG)
        return self.keys.caller(secret)

    def managing(self, authorization: str | None) -> Caller:
        """Who changes adapters or keys, perhaps of one tenant only. Raises AuthenticationError, ForbiddenError."""
        return _at_least(Role.TENANT_ADMIN, self.anybody(authorization))

    def admin(self, authorization: str | None) -> Caller:
        """Who may do everything. Raises AuthenticationError, ForbiddenError."""
        return _at_least(Role.ADMIN, self.anybody(authorization))


def _at_least(role: Role, caller: Caller) -> Caller:
    if not caller.role.includes(role):
        raise ForbiddenError(f"This needs a key of the role {role}; the one that was sent is for {caller.role}.")
    return caller


def auth_required(auth: str, host: str) -> bool:
    """Whether inference needs a key: `on`, or `auto` on any address but loopback."""
    if auth == "auto":
        return not is_loopback(host)
    return auth == "on"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; a name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
