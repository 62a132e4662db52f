"""The chat template that a version brought with it, as its registration noted it in the catalog.

The text itself stands in the catalog's record: so a follower, a restart and a rebuilt catalog have it, and no request
waits for a disk. Equal texts are one in memory, however many adapters have them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from lora_serve.adapters.catalog.entry import VersionEntry
from lora_serve.adapters.checkpoint.chat_template import FoundTemplate

KEY = "chat_template"  # of a version's summary
_PARTS = ("texts", "special_tokens")


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
