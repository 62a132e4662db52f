"""/admin/adapters: list; of one show, share, delete, choose its version (.../route, .../rollback); /admin/aliases"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from aiohttp import web
from msgspec import UNSET

from lora_serve.adapters.catalog.entry import Canary, CatalogEntry
from lora_serve.adapters.catalog.state import Snapshot
from lora_serve.core.adapter import check_adapter_id, split_name
from lora_serve.core.errors import ConflictError, InvalidRequestError, LoraServeError
from lora_serve.core.messages import Evict, Pin, Prefetch, Unpin
from lora_serve.core.tenant import EVERYBODY, Caller, check_tenant_name
from lora_serve.server.admin.answers import AdapterPage, Alias, AliasList, DeletedAdapter, DeletedAlias, RowPage
from lora_serve.server.admin.card import (
    CardFigures,
    adapter_row,
    card_from,
    card_of,
    entry_for,
    figures_for,
    own_name_in,
    pinnable_bytes,
)
from lora_serve.server.admin.protocol import AdaptersQuery, AliasFields, DeletionQuery, RouteFields, SharingFields
from lora_serve.server.answers import json_answer, json_response
from lora_serve.server.context import CONTEXT
from lora_serve.server.json_body import check_fields, check_query, read_json
from lora_serve.server.services import SERVICES, Services
from lora_serve.server.upkeep import pinned_refs

PAGE = 1000  # catalog entries that are looked at in one go
Aliases = Mapping[str, list[str]]  # id -> the aliases that lead to it, as far as the caller may see them
_CARD_VALUES = 100  # the size of a card, as values of an answer
_ENTRY_VALUES = 4  # the work of looking at one entry, in the same unit
_SCHEME, _DIGITS = "sha256:", 6  # so many digits of a digest are no word by chance


async def get_adapter(request: web.Request) -> web.StreamResponse:
    """Show an adapter."""
    return await card_response(request, request.match_info["id"])


async def set_sharing(request: web.Request) -> web.StreamResponse:
    """Share an adapter with the named tenants and no others."""
    services, name = request.app[SERVICES], request.match_info["id"]
    shared_with = check_fields(SharingFields, await read_json(request)).shared_with
    _check_tenants(services, shared_with)
    await services.edit(lambda: services.catalog.set_sharing(name, shared_with), f"sharing {name}")
    return await card_response(request, name)


def _check_tenants(services: Services, names: list[str]) -> None:
    """Raises InvalidRequestError for a name that is well-formed and no tenant's: a slip of the pen would share with
    no tenant, or with one of that name that is made later.
    """
    tenants = services.keys.directory.snapshot.tenants
    unknown = [name for name in names if name != EVERYBODY and check_tenant_name(name, "shared_with") not in tenants]
    if unknown:
        raise InvalidRequestError(
            f"There is no tenant `{unknown[0]}` to share with: make it first (POST /admin/tenants).",
            param="shared_with",
        )


async def delete_adapter(request: web.Request) -> web.StreamResponse:
    """Delete an adapter or one of its versions.

    New requests get a 404 from now on, running ones finish. A name whose record cannot be read is free again.
    """
    version, name = check_query(DeletionQuery, request).version, request.match_info["id"]
    is_freed = request[CONTEXT].known_caller.sees_all and name in request.app[SERVICES].catalog.snapshot.held
    name = name if is_freed else own_name_in(request)
    await remove_adapter(request.app[SERVICES], name, version)
    return json_response(DeletedAdapter(id=name, version=version))


async def remove_adapter(services: Services, name: str, version: int | None) -> None:
    """Unregister an adapter, or one version; durable on return. The reconciler frees the bytes once no running request
    holds them. Raises AdapterNotFoundError, AdapterUnavailableError.
    """
    await services.edit(lambda: services.registry.delete(name, version), f"deleting {name}")


async def card_response(request: web.Request, name: str) -> web.Response:
    """The card of the adapter that `name` means for the caller. Raises AdapterNotFoundError."""
    services, caller = request.app[SERVICES], request[CONTEXT].known_caller
    entry = entry_for(services.catalog.snapshot, name, caller)
    return json_response(await card_of(services, entry, caller))


async def set_route(request: web.Request) -> web.StreamResponse:
    """Choose an adapter's default version and its canary.

    `version`: the default (left out: as it is); `canary`: {"version", "percent"}, or none.
    """
    services, name = request.app[SERVICES], own_name_in(request)
    fields = check_fields(RouteFields, await read_json(request))
    canary = None if fields.canary is None else Canary(fields.canary.version, fields.canary.percent)
    await services.edit(lambda: services.catalog.set_route(name, fields.version, canary), f"routing {name}")
    return await card_response(request, name)


async def roll_back(request: web.Request) -> web.StreamResponse:
    """End an adapter's canary, or go back to the version before.

    409 if there is neither.
    """
    services, name = request.app[SERVICES], own_name_in(request)
    await services.edit(lambda: services.catalog.roll_back(name), f"rolling back {name}")
    return await card_response(request, name)


async def list_aliases(request: web.Request) -> web.StreamResponse:
    """List aliases."""
    aliases = request.app[SERVICES].catalog.snapshot.aliases

    def made() -> AliasList:
        return AliasList([Alias(alias, aliases[alias]) for alias in sorted(aliases)])

    return await json_answer(request, made, 5 * len(aliases))


async def set_alias(request: web.Request) -> web.StreamResponse:
    """Set an alias."""
    services, alias = request.app[SERVICES], request.match_info["id"]
    target = check_fields(AliasFields, await read_json(request)).target
    if check_adapter_id(alias) == services.base_name:
        raise ConflictError(f"`{alias}` is the base model's name.")
    await services.edit(lambda: services.catalog.set_alias(alias, target), f"naming {alias}")
    return json_response(Alias(alias, target))


async def remove_alias(request: web.Request) -> web.StreamResponse:
    """Remove an alias."""
    services, alias = request.app[SERVICES], request.match_info["id"]
    await services.edit(lambda: services.catalog.remove_alias(alias), f"removing {alias}")
    return json_response(DeletedAlias(alias))


async def pin(request: web.Request) -> web.StreamResponse:
    """Keep an adapter on the device from now on, over restarts too."""
    services, name = request.app[SERVICES], own_name_in(request)
    max_bytes = pinnable_bytes(request[CONTEXT].known_caller)
    await services.background.complete(_pin(services, name, max_bytes), f"pinning {name}")
    return await card_response(request, name)


async def unpin(request: web.Request) -> web.StreamResponse:
    """End the pinning of an adapter."""
    services, name = request.app[SERVICES], own_name_in(request)
    await services.background.complete(_unpin(services, name), f"unpinning {name}")
    return await card_response(request, name)


async def prefetch(request: web.Request) -> web.StreamResponse:
    """Load an adapter before it is asked for.

    Answers when the adapter is on the device.
    """
    services, name = request.app[SERVICES], request.match_info["id"]
    entry = services.catalog.entry(name)
    for version in entry.routed:
        await services.client.adapters(Prefetch(entry.ref(version)))
    return await card_response(request, name)


async def evict(request: web.Request) -> web.StreamResponse:
    """Take an adapter off device and host.

    That is done once no row holds it; it stays registered.
    """
    services, name = request.app[SERVICES], request.match_info["id"]
    entry = services.catalog.entry(name)
    pinned = pinned_refs(services.catalog.snapshot)
    if any(version.digest in pinned for version in entry.routed):
        raise ConflictError(f"The adapter `{name}` is pinned: unpin it first.")
    for version in entry.versions:
        await services.client.adapters(Evict(version.digest))
    return await card_response(request, name)


async def _pin(services: Services, name: str, max_bytes: int | None) -> None:
    """Note the pin in the catalog, then load; if that fails, the note is taken back and the error raised."""
    before = services.catalog.entry(name)
    entry = await set_pinned(services, name, True, max_bytes)
    try:
        for version in entry.routed:
            await services.client.adapters(Pin(entry.ref(version)))
    except LoraServeError:
        await set_pinned(services, name, before.pinned)
        raise


async def set_pinned(services: Services, name: str, pinned: bool, max_bytes: int | None = None) -> CatalogEntry:
    """Durable on return. Raises AdapterNotFoundError, ForbiddenError beyond `max_bytes` of its tenant."""
    catalog = services.catalog
    return await services.edit(lambda: catalog.set_pinned(name, pinned, max_bytes), f"noting the pin of {name}")


async def _unpin(services: Services, name: str) -> None:
    entry = await set_pinned(services, name, False)
    still_pinned = pinned_refs(services.catalog.snapshot)
    for version in entry.routed:
        if version.digest not in still_pinned:
            await services.client.adapters(Unpin(version.digest))


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


def _page(services: Services, caller: Caller, query: AdaptersQuery, figures: CardFigures) -> AdapterPage | RowPage:
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
    cards = [card_from(services, entry, figures, caller, aliases.get(entry.name, ())) for entry in page]
    return AdapterPage(data=cards, **more)


def _aliases(snapshot: Snapshot, caller: Caller) -> Aliases:
    found: dict[str, list[str]] = {}
    for alias in sorted(snapshot.aliases):
        if caller.scope is None or alias.startswith(f"{caller.scope}/"):
            found.setdefault(split_name(snapshot.aliases[alias])[0], []).append(alias)
    return found


def _matching(
    snapshot: Snapshot, query: AdaptersQuery, caller: Caller, figures: CardFigures, aliases: Aliases
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


def _ordered(matching: Iterator[CatalogEntry], query: AdaptersQuery, figures: CardFigures) -> list[CatalogEntry]:
    """In the order of the query; where that says nothing, by name."""
    found = list(matching)
    if query.sort != "name":
        found.sort(key=_orders(figures)[query.sort], reverse=query.is_descending)
    elif query.is_descending:
        found.reverse()
    return found


def _orders(figures: CardFigures) -> dict[str, Callable[[CatalogEntry], Any]]:
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
