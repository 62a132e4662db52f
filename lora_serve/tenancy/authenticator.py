"""Authorization header -> Caller"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from lora_serve.core.errors import AuthenticationError
from lora_serve.core.tenant import ADMIN_CALLER, LOCAL_CALLER, Caller
from lora_serve.tenancy.admin_key import AdminKey

MISSING = "No API key was sent. Send it as a header: `Authorization: Bearer KEY`."
WRONG = "The API key is not valid."


@dataclass(frozen=True, slots=True)
class Authenticator:
    """Who may call. `required`: inference needs a key too; the admin API needs one always."""

    admin_key: AdminKey
    required: bool

    def inference(self, authorization: str | None) -> Caller:
        """Who sends an inference request. Raises AuthenticationError."""
        if not self.required:
            return LOCAL_CALLER
        return self.admin(authorization)

    def admin(self, authorization: str | None) -> Caller:
        """Who sends an admin request. Raises AuthenticationError."""
        scheme, _, secret = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise AuthenticationError(MISSING)
        if not self.admin_key.matches(secret.strip()):
            raise AuthenticationError(WRONG)
        return ADMIN_CALLER


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
