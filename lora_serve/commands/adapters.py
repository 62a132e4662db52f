"""`lora-serve adapters`: every call of the admin API on adapters, routes and aliases."""

from __future__ import annotations

import json
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from lora_serve.commands.adapter_card import (
    LIST_COLUMNS,
    NUMBERS,
    card_tables,
    defaults_text,
    is_gone,
    metadata_text,
    show_routing,
    show_sharing,
    show_tiers,
    shows,
)
from lora_serve.commands.flags import (
    ID,
    WAIT,
    YES,
    adapter_id,
    argument,
    canary,
    count,
    files_of,
    json_object,
    new_adapter_id,
    one_of,
    percent,
    tenant_name,
)
from lora_serve.commands.output import CommandError, bytes_text, plain, table_of
from lora_serve.commands.verb import Document, Given, Invocation, Verb, fields_of, run_verbs
from lora_serve.core.adapter import AdapterState
from lora_serve.core.errors import ConfigError
from lora_serve.core.tenant import EVERYBODY

if TYPE_CHECKING:
    from lora_serve.commands.admin_client import AdminReply

DEFAULT_LIMIT = 100
_ADAPTER, _ALIAS = "/admin/adapters/{id}", "/admin/aliases/{id}"


async def register_adapter(call: Invocation) -> None:
    await _show_registered(call, await call.send())


async def upload_adapter(call: Invocation) -> None:
    from lora_serve.commands.admin_client import send_files

    fields = fields_of(call.given, _ADAPTER)
    files = files_of(fields.pop("path"))
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    await _show_registered(
        call, await send_files(call.client, _ADAPTER.format_map(call.given), files, texts, call.output)
    )


async def _show_registered(call: Invocation, reply: AdminReply) -> None:
    card, is_new = reply.data, reply.status == 201
    await call.wait(card)
    newest = max(card["versions"], key=lambda version: int(version["version"]))
    if is_new:
        facts = f"rank {newest['rank']}, {bytes_text(newest['bytes'])}, {newest['digest']}"
        served = "" if newest["version"] == card["version"] else f"; version {card['version']} is still served"
        sentence = f"{card['id']}@{newest['version']} registered: {facts}{served}"
    else:
        sentence = f"{card['id']}: this content was there already; version {card['version']} is served"
    call.output.show(card, sentence, *[defaults_text(card)] * ("metadata" in call.given))
    call.output.warn(dict.fromkeys([*card["warnings"], *(newest["warnings"] if is_new else [])]))


def _label(given: Given) -> str:
    return f"{given['id']}@{given['version']}" if "version" in given else str(given["id"])


def _deletion(given: Given) -> str:
    versions = f"version {given['version']} of" if "version" in given else "all versions of"
    return f"{versions} the adapter {given['id']}"


async def set_canary(call: Invocation) -> None:
    """Sends a share of requests to another version than the default one, whichever that is when the server decides."""
    share = {name: call.given[name] for name in ("version", "percent")} if call.given["percent"] else None
    await call.finish((await call.send(fields={"version": None, "canary": share})).data)


def check_alias(given: Given) -> None:
    """Checks the alias's target. Raises ConfigError."""
    if "delete" in given and "target" in given:
        raise ConfigError("TARGET: not allowed with --delete")
    if not ("delete" in given or "target" in given):
        raise ConfigError("TARGET: expected what the alias means, or --delete")


async def change_alias(call: Invocation) -> None:
    delete = "delete" in call.given
    call.show((await (call.send(f"DELETE {_ALIAS}", {}) if delete else call.send())).data)


def _show_alias(reply: Document, given: Given) -> str:
    return f"alias {given['id']} deleted" if "delete" in given else plain(f"{given['id']} means {reply['target']}")


async def share_adapter(call: Invocation) -> None:
    """Shares; the refusal of a tenant that is not there names the command that makes it, not the server's route."""
    try:
        await call.run()
    except CommandError as error:
        unknown = next((name for name in call.given["shared_with"] if f"`{name}`" in error.lines[0]), "NAME")
        made = f"(lora-serve tenants create {unknown})"
        lines = (line.replace("(POST /admin/tenants)", made) for line in error.lines)
        raise CommandError(error.code, *lines, retry_after=error.retry_after) from None


async def describe_adapter(call: Invocation) -> None:
    metadata = call.given["metadata"]
    if "merge" in call.given:
        merged = (await call.send(f"GET {_ADAPTER}", {})).data["metadata"] | metadata
        metadata = {name: value for name, value in merged.items() if value is not None}
    call.show((await call.send(fields={"metadata": metadata})).data)


def _residency_verb(name: str, summary: str) -> Verb:
    return Verb(name, summary, (f"{name} acme/support",), (ID,), f"POST {_ADAPTER}/{name}", show_tiers)


_NEW_ID = argument("id", type=new_adapter_id, metavar="ID")
_OPTIONS = (
    argument("--tenant", metavar="NAME", help="whose it is (default: what stands before the id's first /)"),
    argument("--pin", action="store_true", help="keep it on the device from now on"),
    argument("--metadata", type=json_object, metavar="JSON", help="a JSON object, kept with it and shown"),
    argument("--allow-noop", action="store_true", help="take it even if it changes no logit"),
    argument(
        "--no-activate", dest="activate", action="store_false", help="a new version of a known id: leave its route"
    ),
    argument("--digest", metavar="sha256:HEX", help="take it only if this is its content's digest"),
    WAIT,
)
VERBS = (
    Verb(
        "list",
        "List adapters by their ids, with state, tiers and use.",
        ("list --tenant acme", "list --state on_device --json", "list --all"),
        (
            argument("--tenant", metavar="NAME", help="only this tenant's"),
            argument("--state", choices=[state.value for state in AdapterState], help="only those in this state"),
            argument("--after", type=adapter_id, metavar="ID", help="begin behind this id"),
            one_of(
                argument("--limit", type=count, metavar="N", help=f"at most so many (default: {DEFAULT_LIMIT})"),
                argument("--all", action="store_true", help="all of them, page by page"),
            ),
        ),
        "GET /admin/adapters",
        lambda page, _: table_of(page["data"], LIST_COLUMNS, NUMBERS, overflow="fold"),
        page_limit=DEFAULT_LIMIT,
        hint=lambda page: [f"there are more: --all, or --after {page['last_id']}"] if page["has_more"] else [],
    ),
    Verb(
        "show",
        "Show an adapter's card.",
        ("show acme/support", "show acme/support --json"),
        (ID,),
        f"GET {_ADAPTER}",
        card_tables,
    ),
    Verb(
        "register",
        "Register an adapter that the server can reach.",
        (
            "register acme/support /srv/adapters/support",
            "register acme/support hf://acme/support-lora@v3 --pin",
            "register acme/support s3://models/support --no-activate --url http://a:8000 --url http://b:8000 --wait",
        ),
        (
            _NEW_ID,
            argument("source", metavar="SOURCE", help="folder on the server, or hf://, s3://, redis://, https://"),
            *_OPTIONS,
        ),
        "POST /admin/adapters",
        None,
        waits_for=shows,
        run=register_adapter,
    ),
    Verb(
        "upload",
        "Upload an adapter from this machine.",
        ("upload acme/support ./out/checkpoint-900", "upload acme/support support.tar.gz --metadata '{\"run\": 17}'"),
        (
            _NEW_ID,
            argument("path", type=Path, metavar="PATH", help="folder, or its tar, tar.gz or zip, on this machine"),
            *_OPTIONS,
        ),
        f"PUT {_ADAPTER}",
        None,
        check=lambda given: files_of(given["path"]),
        waits_for=shows,
        run=upload_adapter,
    ),
    Verb(
        "delete",
        "Unregister an adapter, or one version of it; running requests finish.",
        ("delete acme/support", "delete acme/support --version 2 --yes"),
        (
            ID,
            argument("--version", type=count, metavar="N", help="only this version (default: all of them)"),
            YES,
            WAIT,
        ),
        f"DELETE {_ADAPTER}",
        lambda _, given: f"{_label(given)} deleted",
        deletes=_deletion,
        waits_for=lambda _, given: is_gone(given.get("version")),
    ),
    _residency_verb("pin", "Keep an adapter on the device, over restarts too."),
    _residency_verb("unpin", "Let a pinned adapter leave the device again."),
    _residency_verb("prefetch", "Bring an adapter onto the device; ends when it is there."),
    _residency_verb("evict", "Take an adapter off device and host; it stays registered."),
    Verb(
        "route",
        "Choose the version that an id means, with or without a canary.",
        ("route acme/support 3", "route acme/support 3 --canary 4=10"),
        (
            ID,
            argument("version", type=count, metavar="VERSION", help="the version that the id means from now on"),
            argument(
                "--canary",
                type=canary,
                default=None,
                metavar="V=PERCENT",
                help="give so much of the traffic to version V (default: none)",
            ),
            WAIT,
        ),
        f"PUT {_ADAPTER}/route",
        show_routing,
        waits_for=shows,
    ),
    Verb(
        "canary",
        "Give a share of an id's traffic to another version.",
        ("canary acme/support 4 10", "canary acme/support 4 0"),
        (
            ID,
            argument("version", type=count, metavar="VERSION", help="the version to try"),
            argument("percent", type=percent, metavar="PERCENT", help="its share of the traffic; 0 ends the trial"),
            WAIT,
        ),
        f"PUT {_ADAPTER}/route",
        show_routing,
        waits_for=shows,
        run=set_canary,
    ),
    Verb(
        "rollback",
        "End the canary or, without one, go back to the version that an id meant before.",
        ("rollback acme/support", "rollback acme/support --url http://a:8000 --url http://b:8000 --wait"),
        (ID, WAIT),
        f"POST {_ADAPTER}/rollback",
        show_routing,
        waits_for=shows,
    ),
    Verb(
        "alias",
        "Give an adapter, or a version of it, another name; or take that name away.",
        ("alias acme/live acme/support", "alias acme/frozen acme/support@3", "alias --delete acme/live"),
        (
            argument("id", type=adapter_id, metavar="NAME"),
            argument("target", nargs="?", metavar="TARGET", help="an id, ID@VERSION or ID@sha256:..."),
            argument("--delete", action="store_true", help="take the alias NAME away"),
        ),
        f"PUT {_ALIAS}",
        _show_alias,
        check=check_alias,
        run=change_alias,
    ),
    Verb(
        "aliases",
        "List the aliases.",
        ("aliases", "aliases --json"),
        (),
        "GET /admin/aliases",
        lambda page, _: table_of(page["data"], {name: itemgetter(name) for name in ("alias", "target")}),
    ),
    Verb(
        "share",
        "Let other tenants use an adapter.",
        ("share acme/support --with globex --with initech", "share acme/support --all", "share acme/support --nobody"),
        (
            ID,
            one_of(
                argument(
                    "--with",
                    dest="shared_with",
                    action="append",
                    type=tenant_name,
                    metavar="TENANT",
                    help="this tenant; repeatable, whoever is not named may no longer use it",
                ),
                argument("--all", dest="shared_with", action="store_const", const=[EVERYBODY], help="every tenant"),
                argument("--nobody", dest="shared_with", action="store_const", const=[], help="its owner alone"),
                required=True,
            ),
        ),
        f"PUT {_ADAPTER}/sharing",
        show_sharing,
        run=share_adapter,
    ),
    Verb(
        "describe",
        "Change an adapter's metadata: notes of your own, and the defaults of requests that name it.",
        (
            'describe acme/support \'{"team": "support", "sampling": {"temperature": 0.2, "max_tokens": 300}}\'',
            'describe acme/support --merge \'{"sampling": {"temperature": 0.4}}\'',
        ),
        (
            ID,
            argument(
                "metadata",
                type=json_object,
                metavar="JSON",
                help="a JSON object; it takes the place of all that was there, defaults too, unless --merge is given",
            ),
            argument(
                "--merge", action="store_true", help="change the names in JSON alone (one that is null is taken away)"
            ),
        ),
        f"PATCH {_ADAPTER}",
        lambda card, _: (f"{card['id']} has other metadata", metadata_text(card)),
        run=describe_adapter,
        note=lambda card: (f"warning: {warning}" for warning in card["warnings"]),
    ),
)
# Takes the arguments and returns the exit code (`commands.output.ExitCode`); raises ConfigError.
run = partial(run_verbs, "lora-serve adapters", "Client of a running server's admin API.", VERBS)
