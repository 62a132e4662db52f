"""The verbs against the server's table of routes: each calls a route that there is, with fields that it takes."""

from __future__ import annotations

import argparse
from dataclasses import fields

import pytest

from lora_serve.commands import adapters, fleet_members, tenancy
from lora_serve.commands.flags import CommandParser, add_tenant_limits
from lora_serve.commands.verb import Verb, fields_of
from lora_serve.core.tenant import Quota
from lora_serve.server.admin.protocol import UploadFields
from lora_serve.server.routes import TABLE

VERBS = (*adapters.VERBS, *tenancy.TENANT_VERBS, *tenancy.KEY_VERBS, tenancy.USAGE, tenancy.AUDIT, fleet_members.STATUS)
NOT_FIELDS = {  # arguments of verbs with a `run` of their own, which makes the fields from them
    "upload": {"path"},
    "canary": {"percent"},
    "alias": {"delete"},
    "describe": {"merge"},
}


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_verb_calls_a_route_of_the_table_with_its_fields(verb: Verb) -> None:
    method, _, path = verb.route.partition(" ")
    (route,) = (one for one in TABLE.routes if (one.method, one.path) == (method, path))
    schemas = (*route.schemas, *([route.query] if route.query else []))
    if verb.name == "upload":
        schemas = (UploadFields,)
    taken = {field.alias or name for schema in schemas for name, field in schema.model_fields.items()}
    given = dict.fromkeys(_arguments(verb), 1)
    assert set(fields_of(given, path)) - NOT_FIELDS.get(verb.name, set()) <= taken
    assert all(f"{{{name}}}" not in path.format_map(given) for name in given)


def test_flags_of_limits_are_the_limits_of_a_quota() -> None:
    parser = CommandParser("x")
    add_tenant_limits(parser)
    found = [action.dest for action in parser._actions if action.dest.startswith("quota.")]
    assert found == [f"quota.{field.name}" for field in fields(Quota)]


def _arguments(verb: Verb) -> list[str]:
    parser = CommandParser("x")
    for add in verb.arguments:
        add(parser)
    return [action.dest for action in parser._actions if action.dest != argparse.SUPPRESS and action.dest != "help"]
