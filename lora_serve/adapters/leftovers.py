"""Removes what an earlier life of the server left over in its store."""

from __future__ import annotations

import logging
from pathlib import Path

from lora_serve.adapters.stores.base import AdapterStore, Knows
from lora_serve.adapters.stores.files import listed, private_or_later, remove_folder
from lora_serve.adapters.stores.monitor import words_of

_log = logging.getLogger(__name__)


def sweep_leftovers(
    adapters: AdapterStore, folder: Path, named: frozenset[str], knows: Knows, unnamed_days: float
) -> None:
    """Those of the store's `folder`, and of `adapters` in it; see AdapterStore.sweep.

    What cannot be removed now is left to the next start.
    """
    try:
        for left in listed(private_or_later(folder / "tmp")):
            remove_folder(left)
        num_aside = adapters.sweep(named, knows, unnamed_days)
    except OSError as error:
        _log.warning("what an earlier life left over stays until the next start: %s", words_of(error))
        return
    if num_aside:
        _log.warning(
            "%d blobs that the catalog does not know are kept aside in %s; `lora-serve registry rebuild` brings back "
            "what they were",
            num_aside,
            folder,
        )
