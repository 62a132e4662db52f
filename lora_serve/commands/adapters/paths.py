"""The admin API's paths."""

from __future__ import annotations


def adapter_path(adapter_id: str, verb: str = "") -> str:
    """/admin/adapters/{id}[/verb]; a legal id (`check_adapter_id`) holds nothing that needs quoting."""
    path = f"/admin/adapters/{adapter_id}"
    return f"{path}/{verb}" if verb else path
