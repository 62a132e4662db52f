"""Merges two branches of the directory, after a shared journal was started from an older state and went on: a tenant or
a key that was closed on either branch stays closed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lora_serve.tenancy.directory.documents import document_of, key_of
from lora_serve.tenancy.directory.state import KEY, TENANT

Records = dict[str, str]
_Contested = Mapping[str, tuple[str | None, str | None]]


def merge_branches(records: Records, contested: _Contested) -> Records:
    """`records`, with the names that may have changed on both branches: (ours, theirs).

    A record that is gone on one branch is gone, a key that was ended on one is ended, and otherwise theirs, the branch
    that went on, counts. Keys without a tenant are dropped.
    """
    merged = dict(records)
    for name, (ours, theirs) in contested.items():
        if ours is None or theirs is None:
            merged.pop(name, None)
        else:
            merged[name] = _ended_as_either(name, ours, theirs) if name.startswith(KEY) else theirs
    return {name: text for name, text in merged.items() if not _is_orphan(name, text, merged)}


def _ended_as_either(name: str, ours: str, theirs: str) -> str:
    our, their = (key_of(name.removeprefix(KEY), text) for text in (ours, theirs))
    if our is None or their is None:
        return theirs if our is None else ours
    revoked, expires = _sooner(our.revoked, their.revoked), _sooner(our.expires, their.expires)
    return document_of(replace(their, revoked=revoked, expires=expires))


def _sooner(one: float | None, other: float | None) -> float | None:
    times = [time for time in (one, other) if time is not None]
    return min(times, default=None)


def _is_orphan(name: str, text: str, records: Mapping[str, str]) -> bool:
    """True for a key whose tenant is gone: it would be valid again once there is a tenant of that name."""
    key = key_of(name.removeprefix(KEY), text) if name.startswith(KEY) else None
    return key is not None and TENANT + key.tenant not in records
