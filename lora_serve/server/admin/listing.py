"""GET /admin/adapters: search, order, pages, and light rows for those who show very many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from aiohttp import web
from msgspec import UNSET

from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.adapters.catalog.snapshot import Snapshot
from lora_serve.core.adapter import split_name
from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.tenant import Caller
from lora_serve.server.admin.adapters import card_from
from lora_serve.server.admin.card import Figures, adapter_row, figures_for
from lora_serve.server.answers.json_answer import json_answer
from lora_serve.server.bodies.json_body import check_query
from lora_serve.server.context import CONTEXT
from lora_serve.server.schemas.answers.adapters import AdapterPage, RowPage
from lora_serve.server.schemas.queries import AdaptersQuery
from lora_serve.server.services import SERVICES, Services

_CARD_VALUES = 100  # the size of a card, as values of an answer
_ENTRY_VALUES = 4  # the work of looking at one entry, in the same unit
_SCHEME, _DIGITS = "sha256:", 6  # so many digits of a digest are no word by chance
PAGE = 1000  # catalog entries that are looked at in one go

Aliases = Mapping[str, list[str]]  # id -> the aliases that lead to it, as far as the caller may see them


async def list_adapters(request: web.Request) -> web.StreamResponse:
    """List adapters.

    By name, with `has_more` and `last_id` for the next page; in another order by `offset`. Every word of `search` is in
    the id, the tenant or an alias, or begins a version's digest. `unreadable`, if there are any: names
    whose records cannot be read.
    """
    services, caller, query = request.app[SERVICES], request[CONTEXT].known_caller, check_query(AdaptersQuery, request)
    if query.after is not None and not query.is_by_name:
        raise InvalidRequestError("`after` is for the order by name: use `offset` in another one.", param="after")
    figures = await figures_for(services, caller)
    num_names, is_light = len(services.catalog.snapshot.names), query.fields == "summary"
    length = _ENTRY_VALUES * num_names + (_ENTRY_VALUES if is_light else _CARD_VALUES) * query.limit
    return await json_answer(request, lambda: _page(services, caller, query, figures), length)


def _page(services: Services, caller: Caller, query: AdaptersQuery, figures: Figures) -> AdapterPage | RowPage:
    snapshot = services.catalog.snapshot
    aliases = _aliases(snapshot, caller)
    matching, start = _matching(snapshot, query, caller, figures, aliases), query.offset
    is_light = query.fields == "summary"
    if query.is_by_name and not is_light:  # no more is looked at than the page needs
        found, total = list(islice(matching, start, start + query.limit + 1)), None
    else:
        ordered = _ordered(matching, query, figures)
        found, total = ordered[start : start + query.limit + 1], len(ordered)
    page = found[: query.limit]
    more: Any = {
        "has_more": len(found) > query.limit,
        "last_id": page[-1].name if page else None,
        "total": UNSET if total is None else total,
        "unreadable": snapshot.held_for(caller.scope) or UNSET,
    }
    if is_light:
        rows = [adapter_row(entry, figures, aliases.get(entry.name, []), caller.scope) for entry in page]
        return RowPage(data=rows, **more)
    return AdapterPage(data=[card_from(services, entry, figures, caller) for entry in page], **more)


def _aliases(snapshot: Snapshot, caller: Caller) -> Aliases:
    found: dict[str, list[str]] = {}
    for alias in sorted(snapshot.aliases):
        if caller.scope is None or alias.startswith(f"{caller.scope}/"):
            found.setdefault(split_name(snapshot.aliases[alias])[0], []).append(alias)
    return found


def _matching(
    snapshot: Snapshot, query: AdaptersQuery, caller: Caller, figures: Figures, aliases: Aliases
) -> Iterator[CatalogEntry]:
    """The entries that the query asks for and the caller may see, by name."""
    words, state, after = query.search.casefold().split(), query.state, query.after
    while True:
        page = snapshot.page(query.tenant, after, PAGE, caller.scope)
        for entry in page:
            if state is not None and figures.state(entry.default.digest) is not state:
                continue
            if not words or _has(entry, words, aliases.get(entry.name, ())):
                yield entry
        if len(page) < PAGE:
            return
        after = page[-1].name


def _has(entry: CatalogEntry, words: list[str], aliases: Sequence[str]) -> bool:
    text = "\n".join((entry.name, entry.tenant, *aliases)).casefold()
    return all(word in text or _begins_digest(entry, word) for word in words)


def _begins_digest(entry: CatalogEntry, word: str) -> bool:
    digits = word.removeprefix(_SCHEME)
    return len(digits) >= _DIGITS and any(version.digest.startswith(_SCHEME + digits) for version in entry.versions)


def _ordered(matching: Iterator[CatalogEntry], query: AdaptersQuery, figures: Figures) -> list[CatalogEntry]:
    """In the order of the query; where that says nothing, by name."""
    found = list(matching)
    if query.sort != "name":
        found.sort(key=_orders(figures)[query.sort], reverse=query.is_descending)
    elif query.is_descending:
        found.reverse()
    return found


def _orders(figures: Figures) -> dict[str, Callable[[CatalogEntry], Any]]:
    def requests(entry: CatalogEntry) -> tuple[int, int]:
        answers = figures.answers(entry)
        return answers.per_minute, answers.in_window

    return {
        "bytes": lambda entry: entry.default.num_bytes,
        "rank": lambda entry: entry.default.rank,
        "created": lambda entry: entry.created,
        "last_used": lambda entry: figures.answers(entry).last_used or 0,
        "requests": requests,
    }
