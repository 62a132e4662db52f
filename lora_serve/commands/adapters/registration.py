"""`lora-serve adapters register | upload`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from lora_serve.commands.adapters.card import defaults_text
from lora_serve.commands.adapters.upload_files import files_of, send_files
from lora_serve.commands.adapters.waiting import shows, wait_for_all
from lora_serve.commands.flags import adapter_path, add_wait_flag, json_object, new_adapter_id
from lora_serve.commands.output import bytes_text
from lora_serve.commands.verb import Call, Verb


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", metavar="NAME", help="whose it is (default: what stands before the id's first /)")
    parser.add_argument("--pin", action="store_true", help="keep it on the device from now on")
    parser.add_argument("--metadata", type=json_object, metavar="JSON", help="a JSON object, kept with it and shown")
    parser.add_argument("--allow-noop", action="store_true", help="take it even if it changes no logit")
    parser.add_argument(
        "--no-activate", dest="activate", action="store_false", help="a new version of a known id: leave its route"
    )
    parser.add_argument("--digest", metavar="sha256:HEX", help="take it only if this is its content's digest")
    add_wait_flag(parser)


def _register_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", type=new_adapter_id, metavar="ID")
    parser.add_argument("source", metavar="SOURCE", help="folder on the server, or hf://, s3://, redis://, https://")
    _options(parser)


def _upload_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", type=new_adapter_id, metavar="ID")
    parser.add_argument("path", type=Path, metavar="PATH", help="folder, or its tar, tar.gz or zip, on this machine")
    _options(parser)


def _check_path(flags: argparse.Namespace) -> None:
    """Checks that the path exists. Raises ConfigError."""
    files_of(flags.path)


def _fields(flags: argparse.Namespace) -> dict[str, Any]:
    """The fields that flags name; the server's defaults stand for the rest."""
    fields: dict[str, Any] = {} if flags.tenant is None else {"tenant": flags.tenant}
    if flags.metadata is not None:
        fields["metadata"] = flags.metadata
    if flags.digest is not None:
        fields["digest"] = flags.digest
    fields |= {name: True for name in ("pin", "allow_noop") if getattr(flags, name)}
    return fields if flags.activate else {**fields, "activate": False}


async def register_adapter(call: Call) -> None:
    body = {"id": call.flags.id, "source": call.flags.source, **_fields(call.flags)}
    reply = await call.client.call("POST", "/admin/adapters", body=body)
    await _finish(call, reply.status == 201, reply.data)


async def upload_adapter(call: Call) -> None:
    texts = {
        name: value if isinstance(value, str) else json.dumps(value) for name, value in _fields(call.flags).items()
    }
    path = adapter_path(call.flags.id)
    reply = await send_files(call.client, path, files_of(call.flags.path), texts, call.output)
    await _finish(call, reply.status == 201, reply.data)


async def _finish(call: Call, is_new: bool, card: dict[str, Any]) -> None:
    if call.flags.wait:
        await wait_for_all(call, card["id"], shows(card))
    shown = [_sentence(is_new, card)] + [defaults_text(card)] * (call.flags.metadata is not None)
    call.output.show(card, *shown)
    call.output.warn(dict.fromkeys([*card["warnings"], *(_newest(card)["warnings"] if is_new else [])]))


def _sentence(is_new: bool, card: dict[str, Any]) -> str:
    if not is_new:
        return f"{card['id']}: this content was there already; version {card['version']} is served"
    newest = _newest(card)
    facts = f"rank {newest['rank']}, {bytes_text(newest['bytes'])}, {newest['digest']}"
    served = "" if newest["version"] == card["version"] else f"; version {card['version']} is still served"
    return f"{card['id']}@{newest['version']} registered: {facts}{served}"


def _newest(card: dict[str, Any]) -> dict[str, Any]:
    newest: dict[str, Any] = max(card["versions"], key=lambda version: int(version["version"]))
    return newest


VERBS = (
    Verb(
        "register",
        "Register an adapter that the server can reach.",
        (
            "register acme/support /srv/adapters/support",
            "register acme/support hf://acme/support-lora@v3 --pin",
            "register acme/support s3://models/support --no-activate --url http://a:8000 --url http://b:8000 --wait",
        ),
        _register_flags,
        register_adapter,
    ),
    Verb(
        "upload",
        "Upload an adapter from this machine.",
        ("upload acme/support ./out/checkpoint-900", "upload acme/support support.tar.gz --metadata '{\"run\": 17}'"),
        _upload_flags,
        upload_adapter,
        check=_check_path,
    ),
)
