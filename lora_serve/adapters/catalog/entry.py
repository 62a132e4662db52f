"""One adapter id in the catalog: its versions, and the route that says which of them the id means."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec.structs import asdict, replace

from lora_serve.core.adapter import AdapterRef, AdapterTraits, Count
from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.tenant import EVERYBODY, check_tenant_name, is_visible

MAX_METADATA_BYTES = 65536
MAX_SHARED = 1000  # tenants by name

FOLDER = "folder "  # how the source of a folder begins; its path follows
T = TypeVar("T")
_Finite = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]

if TYPE_CHECKING:
    Noted = msgspec.Raw | Mapping[str, Any]
else:  # A summary that is read stays JSON: a start reads all of them, and a page of cards shows a few.
    Noted = msgspec.Raw


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A part of a record, read in one piece with all its checks; nothing in it leads back to it."""


class Facts(msgspec.Struct, frozen=True, gc=False):
    """The parts of a summary that are checked whenever a record is read."""

    traits: AdapterTraits = AdapterTraits()
    converted_from: Mapping[str, Any] = {}
    chat_template: Any = None


class VersionEntry(_Record, frozen=True, eq=False):  # noqa: PLW1641 - no hash, as its summary has none
    """One version of one adapter."""

    version: Count
    digest: Annotated[str, msgspec.Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]
    rank: Count
    num_bytes: Count
    noted: Noted = msgspec.field(name="summary")
    source: str  # shown on the card
    created: _Finite  # Unix seconds

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VersionEntry) and asdict(self.read) == asdict(other.read)

    @property
    def summary(self) -> dict[str, Any]:
        """The facts for the card."""
        return _read(self.noted, dict)

    @property
    def read(self) -> VersionEntry:
        """The same with its summary as a mapping."""
        return replace(self, noted=self.summary)

    @property
    def facts(self) -> Facts:
        """Raises msgspec.ValidationError for facts of another form."""
        return _read(self.noted, Facts)


def _read(noted: Noted, kind: type[T]) -> T:
    if isinstance(noted, msgspec.Raw):
        try:
            return msgspec.json.decode(noted, type=kind)
        except msgspec.DecodeError:  # texts may hold halves of a character, which JSON allows
            noted = json.loads(bytes(noted))
    return msgspec.convert(noted, kind)


class Canary(_Record, frozen=True):
    """A version that gets a percentage of an id's requests."""

    version: Count
    percent: _Finite  # 0 to 100


class Route(_Record, frozen=True):
    """The version that the bare id means."""

    version: int
    canary: Canary | None = None
    history: tuple[int, ...] = ()  # earlier default versions, the latest one last


class CatalogEntry(_Record, frozen=True):
    """One adapter id with its versions, oldest first; at least one."""

    name: str
    tenant: str
    pinned: bool
    created: _Finite
    metadata: Mapping[str, Any]
    last_version: Count  # the largest number ever given
    route: Route
    versions: tuple[VersionEntry, ...]
    shared_with: tuple[str, ...] = ()  # other tenants that may use it, sorted; "*": all

    def is_visible_to(self, tenant: str | None) -> bool:
        """True if the tenant may use the adapter; None: a caller that sees all tenants."""
        return is_visible(self.tenant, self.shared_with, tenant)

    @property
    def default_version(self) -> int:
        """The number of the version that the bare id means."""
        return self.route.version

    @property
    def default(self) -> VersionEntry:
        """The version that the bare id means, canary aside."""
        return self.version(self.route.version)

    @property
    def history(self) -> tuple[int, ...]:
        """Earlier default versions, the latest one last."""
        return self.route.history

    @property
    def previous(self) -> VersionEntry | None:
        """The default version before the present one."""
        return self.version(self.history[-1]) if self.history else None

    def version(self, number: int) -> VersionEntry:
        """The version of this number, which must exist."""
        return next(version for version in self.versions if version.version == number)

    def has_version(self, number: int) -> bool:
        """True if there is a version of this number."""
        return any(version.version == number for version in self.versions)

    def has_content(self, digest: str) -> bool:
        """True if files of this digest are one of the versions, as stored or as sent before a conversion."""
        return any(digest in (v.digest, v.summary.get("converted_from", {}).get("digest")) for v in self.versions)

    def ref(self, version: VersionEntry | None = None) -> AdapterRef:
        """The reference that travels with requests."""
        found = version or self.default
        return AdapterRef(
            self.tenant, self.name, found.version, found.digest, found.rank, found.num_bytes, found.facts.traits
        )

    @property
    def digests(self) -> frozenset[str]:
        """The digests of all versions."""
        return frozenset(version.digest for version in self.versions)

    @property
    def routed(self) -> tuple[VersionEntry, ...]:
        """The versions that requests for the bare id may get."""
        canary = self.route.canary
        return (self.default,) if canary is None else (self.default, self.version(canary.version))


def tenant_of(name: str, tenant: str | None = None) -> str:
    """The owner of an adapter: as given, else the part of its id before the first "/", else "default"."""
    return tenant or (name.partition("/")[0] if "/" in name else "default")


def check_tenant(tenant: str | None) -> None:
    """Raises InvalidRequestError."""
    if tenant is not None:
        check_tenant_name(tenant)


def check_sharing(shared_with: Collection[str]) -> None:
    """Raises InvalidRequestError."""
    if len(shared_with) > MAX_SHARED:
        raise InvalidRequestError(
            f"An adapter can be shared with {MAX_SHARED} tenants by name, or with all.", param="shared_with"
        )
    for name in shared_with:
        if name != EVERYBODY:
            check_tenant_name(name, "shared_with")


def check_metadata(metadata: Mapping[str, Any] | None) -> None:
    """Raises InvalidRequestError."""
    try:
        text = json.dumps(dict(metadata or {}), allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequestError("metadata must be a JSON object.", param="metadata") from None
    if len(text) > MAX_METADATA_BYTES:
        raise InvalidRequestError(f"metadata must not exceed {MAX_METADATA_BYTES} bytes.", param="metadata")


def shown_source(source: str) -> str:
    """A version's source as cards show it: of a folder of this machine only its own name."""
    return f"{FOLDER}{PurePath(source.removeprefix(FOLDER)).name}" if source.startswith(FOLDER) else source
