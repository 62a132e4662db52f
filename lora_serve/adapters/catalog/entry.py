"""One adapter id in the catalog: its versions, and the route that says which of them the id means."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec.structs import asdict, replace

from lora_serve.adapters.checkpoint.chat_template import FoundTemplate
from lora_serve.core.adapter import AdapterRef, AdapterTraits, NonNegativeInt, check_adapter_id
from lora_serve.core.errors import InvalidRequestError, RequestError
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

KEY = "chat_template"  # of a version's summary
_PARTS = ("texts", "special_tokens")
_log = logging.getLogger(__name__)


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A part of a record, read in one piece with all its checks; nothing in it leads back to it."""


class Facts(msgspec.Struct, frozen=True, gc=False):
    """The parts of a summary that are checked whenever a record is read."""

    traits: AdapterTraits = AdapterTraits()
    converted_from: Mapping[str, Any] = {}
    chat_template: Any = None


class VersionEntry(_Record, frozen=True, eq=False):  # noqa: PLW1641 - no hash, as its summary has none
    """One version of one adapter."""

    version: NonNegativeInt
    digest: Annotated[str, msgspec.Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]
    rank: NonNegativeInt
    num_bytes: NonNegativeInt
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

    @property
    def sent_digest(self) -> str:
        """The digest of its files as they were sent, before a conversion."""
        return str(self.facts.converted_from.get("digest", self.digest))


def _read(noted: Noted, kind: type[T]) -> T:
    if isinstance(noted, msgspec.Raw):
        try:
            return msgspec.json.decode(noted, type=kind)
        except msgspec.DecodeError:  # texts may hold halves of a character, which JSON allows
            noted = json.loads(bytes(noted))
    return msgspec.convert(noted, kind)


class Canary(_Record, frozen=True):
    """A version that gets a percentage of an id's requests."""

    version: NonNegativeInt
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
    last_version: NonNegativeInt  # the largest number ever given
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
        return any(digest in (version.digest, version.sent_digest) for version in self.versions)

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
    return FOLDER + source.removeprefix(FOLDER).rstrip("/").rpartition("/")[2] if source.startswith(FOLDER) else source


@dataclass(frozen=True, slots=True)
class NotedTemplate:
    """See FoundTemplate. Without `texts` none was kept."""

    differs: bool
    is_vouched: bool = False  # the admin key registered it
    texts: tuple[tuple[str, str], ...] = ()
    special_tokens: tuple[tuple[str, str], ...] = ()

    def is_used(self, rule: str) -> bool:
        """True if the operator's rule (--adapter-chat-templates) lets it take the place of the base's."""
        return bool(self.texts) and (rule == "tenant" or (rule == "admin" and self.is_vouched))

    def reason(self, rule: str) -> str:
        """The reason why it is used, or not."""
        setting = f"--adapter-chat-templates {rule}"
        if not self.differs:
            return "it is the base model's own"
        if self.is_used(rule):
            return f"{setting}: the admin key registered it" if rule == "admin" else setting
        if rule == "off":
            return setting
        if not self.texts:
            return "it was registered under --adapter-chat-templates off, and was not kept: register it again"
        return f"{setting}: a tenant's key registered it"

    def warnings(self, rule: str) -> list[str]:
        """A warning if chats with the adapter are not written with the template that it was trained with."""
        if not self.differs or self.is_used(rule):
            return []
        other = " Ask the operator to register the same files with the admin key." if self.texts else ""
        return [f"Its own chat template is not used ({self.reason(rule)}): chats have the base model's.{other}"]

    def card(self, rule: str) -> dict[str, Any]:
        """The part of the adapter's card."""
        return {"differs": self.differs, "used": self.is_used(rule), "why": self.reason(rule)}


def note_of(found: FoundTemplate) -> dict[str, Any]:
    """The note for a version's summary, not vouched for."""
    if found.kept is None:
        return {"differs": found.differs}
    made: dict[str, Any] = interned(
        {"differs": True, "texts": dict(found.kept.texts), "special_tokens": dict(found.kept.special_tokens)}
    )
    return made


def noted_template(version: VersionEntry) -> NotedTemplate | None:
    """The note of a version; None if it brought no template, or one in a form that is not this server's."""
    note = version.facts.chat_template
    if not isinstance(note, Mapping):
        return None
    texts, tokens = (note.get(part, {}) for part in _PARTS)
    if not _are_texts(texts) or not _are_texts(tokens):
        return None
    pairs = tuple(sorted(texts.items())), tuple(sorted(tokens.items()))
    return NotedTemplate(note.get("differs") is True, note.get("by") == "admin", *pairs)


def vouched(version: VersionEntry) -> VersionEntry:
    """The version as one that the admin key registered."""
    note = version.facts.chat_template
    if not isinstance(note, Mapping) or "texts" not in note:
        return version
    return replace(version, noted={**version.summary, KEY: {**note, "by": "admin"}})


def interned(note: Any) -> Any:
    """The note with texts that equal ones share."""
    if not isinstance(note, Mapping) or not all(_are_texts(note.get(part, {})) for part in _PARTS):
        return note
    shared = {part: {name: sys.intern(text) for name, text in note[part].items()} for part in _PARTS if part in note}
    return {**note, **shared}


def _are_texts(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(item, str) for pair in value.items() for item in pair)


_decoder = msgspec.json.Decoder(CatalogEntry)


def document_of(entry: CatalogEntry) -> str:
    """The entry as text."""
    fields = msgspec.to_builtins(replace(entry, versions=tuple(version.read for version in entry.versions)))
    if not entry.shared_with:  # servers of versions before sharing read it too
        del fields["shared_with"]
    return json.dumps(fields, separators=(",", ":"))


def entry_of(text: str) -> CatalogEntry | None:
    """The entry of a text; None, and a line in the log, for a text that no server can have written."""
    try:
        try:
            entry = _decoder.decode(text)
        except msgspec.MsgspecError:  # texts of metadata may hold halves of a character, which JSON allows
            fields = json.loads(text)
            for version in fields.get("versions", ()):
                version["summary"] = msgspec.Raw(json.dumps(version["summary"]).encode())
            entry = msgspec.convert(fields, CatalogEntry)
        return _checked(entry)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, RequestError) as error:
        _log.error("a record of the catalog cannot be read and is left out: %r", error)
        return None


def _checked(entry: CatalogEntry) -> CatalogEntry:
    """Those who can write into the journal must not be able to name a file of this machine, and a malformed record
    must not break the listing of all.
    """
    check_adapter_id(entry.name)
    check_tenant(entry.tenant)
    numbers, is_shared = set[int](), False
    for version in entry.versions:
        numbers.add(version.version)
        is_shared = version.facts.chat_template is not None or is_shared  # raises for facts of another form
    route = entry.route
    if not numbers.issuperset((route.version, *route.history, *((route.canary.version,) if route.canary else ()))):
        raise ValueError("a route leads nowhere")
    return replace(entry, versions=tuple(map(_with_shared_texts, entry.versions))) if is_shared else entry


def _with_shared_texts(version: VersionEntry) -> VersionEntry:
    note = version.facts.chat_template
    return version if note is None else replace(version, noted={**version.summary, KEY: interned(note)})
