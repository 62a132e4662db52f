"""What an adapter is called and where it is."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from lora_serve.core.errors import InvalidRequestError

ADAPTER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}\Z")


class AdapterState(enum.StrEnum):
    """REGISTERED -> FETCHING -> ON_HOST <-> ON_DEVICE, and any -> FAILED."""

    REGISTERED = "registered"
    FETCHING = "fetching"
    ON_HOST = "on_host"
    ON_DEVICE = "on_device"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One version of one adapter, named by the digest of its content.

    Every cache key below the doors carries `digest`; names and version numbers are for people.
    """

    tenant: str
    name: str  # the public id, e.g. "acme/support"
    version: int  # 1, 2, 3, ... per name
    digest: str  # "sha256:" + 64 hex digits over config and weights
    rank: int  # the largest rank of any module
    num_bytes: int  # host bytes of its LoRA weights once loaded

    @property
    def label(self) -> str:
        """`name@version`, for logs."""
        return f"{self.name}@{self.version}"


def check_adapter_id(adapter_id: str) -> str:
    """Return `adapter_id` unchanged if it is a legal id, else raise InvalidRequestError.

    Legal: `[A-Za-z0-9][A-Za-z0-9._/-]{0,127}` without `..` (so no `:`, no `,`, no `@`, no path tricks).
    """
    if not ADAPTER_ID.match(adapter_id) or ".." in adapter_id or "//" in adapter_id or adapter_id.endswith("/"):
        raise InvalidRequestError(
            f"{adapter_id[:140]!r} is not a legal adapter id: it must match [A-Za-z0-9][A-Za-z0-9._/-]{{0,127}} "
            "and hold no '..', no '//' and no '/' at its end.",
            param="id",
        )
    return adapter_id
