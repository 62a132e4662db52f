"""The fields that say what an answer must be: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`.

They are looked at by hand, and only as deep as their own words go: a schema may be as large as a body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.schemas.fields import MAX_NAME_LENGTH, Fields, Ignored, ObjectOrNull
from lora_serve.text.grammars import Constraint, ConstraintKind, JsonStyle

MAX_DESCRIPTION = 4096  # characters
_KINDS = tuple(ConstraintKind)
_GUIDED = {f"guided_{kind}": kind for kind in _KINDS if kind is not ConstraintKind.STRUCTURAL_TAG}
_STYLE = ("disable_any_whitespace", "disable_additional_properties")
_IGNORED = ("disable_fallback", "backend", "backend_was_auto", "_backend", "_backend_was_auto")


class StructuredFields(Fields):
    """The fields, of which a request may have one."""

    response_format: ObjectOrNull = None
    structured_outputs: ObjectOrNull = None
    guided_json: Any = None
    guided_json_object: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structural_tag: Any = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: Annotated[Any, Ignored("there is one backend, which does it all")] = None


def constraint_of(fields: StructuredFields) -> Constraint | None:
    """The constraint of a request; None: the answer may be anything. Raises InvalidRequestError."""
    found = [constraint for constraint in (_of_format(fields), _of_vllm(fields), *_of_guided(fields)) if constraint]
    if len(found) > 1:
        names = " and ".join(f"`{constraint.param}`" for constraint in found[:2])
        raise InvalidRequestError(f"{names} both say what the answer must be: send one of them.", found[1].param)
    return found[0] if found else None


def _of_format(fields: StructuredFields) -> Constraint | None:
    value, param = fields.response_format, "response_format"
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint(ConstraintKind.JSON_OBJECT, None, param)
    if kind == "structural_tag":
        return Constraint(ConstraintKind.STRUCTURAL_TAG, value, param)
    if kind == "json_schema":
        return _of_schema(value.get("json_schema"), f"{param}.json_schema")
    raise _wrong(param, 'must be an object whose "type" is "text", "json_object", "json_schema" or "structural_tag"')


def _of_schema(value: Any, param: str) -> Constraint:
    """https://platform.openai.com/docs/api-reference/chat/create#chat-create-response_format"""
    if not isinstance(value, dict):
        raise _wrong(param, 'must be an object with "name" and "schema"')
    name, description, strict = value.get("name"), value.get("description"), value.get("strict")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH:
        raise _wrong(f"{param}.name", f"must be a name of 1 to {MAX_NAME_LENGTH} characters")
    if description is not None and not (isinstance(description, str) and len(description) <= MAX_DESCRIPTION):
        raise _wrong(f"{param}.description", f"must be a text of {MAX_DESCRIPTION} characters at most")
    if strict is not None and not isinstance(strict, bool):
        raise _wrong(f"{param}.strict", "must be true or false")
    if value.get("schema") is None:
        raise _wrong(f"{param}.schema", "is missing; for any JSON object send response_format json_object")
    return Constraint(ConstraintKind.JSON, value["schema"], f"{param}.schema")


def _of_vllm(fields: StructuredFields) -> Constraint | None:
    value, param = fields.structured_outputs, "structured_outputs"
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _wrong(param, "must be an object with one of " + ", ".join(f'"{kind}"' for kind in _KINDS))
    given = {name: item for name, item in value.items() if item is not None}
    unknown = sorted(given.keys() - {*_KINDS, *_STYLE, "whitespace_pattern", *_IGNORED})
    if unknown:
        raise _wrong(param, f"has no field {unknown[0][:MAX_NAME_LENGTH]!r}")
    kinds = [kind for kind in _KINDS if kind in given and not (kind == "json_object" and given[kind] is False)]
    if len(kinds) != 1:
        allowed = ", ".join(f'"{kind}"' for kind in _KINDS)
        raise _wrong(param, f"must hold exactly one of {allowed}, not {len(kinds)} of them")
    return _constraint(kinds[0], given[kinds[0]], f"{param}.{kinds[0]}", _style(given, param))


def _of_guided(fields: StructuredFields) -> list[Constraint]:
    pattern = fields.guided_whitespace_pattern
    style = JsonStyle(whitespace_pattern=pattern)
    values = {name: getattr(fields, name) for name in _GUIDED} | {"structural_tag": fields.structural_tag}
    kinds: Mapping[str, ConstraintKind] = {**_GUIDED, "structural_tag": ConstraintKind.STRUCTURAL_TAG}
    asked = {name: value for name, value in values.items() if value is not None}
    if asked.get("guided_json_object") is False:
        del asked["guided_json_object"]
    return [_constraint(kinds[name], value, name, style) for name, value in asked.items()]


def _constraint(kind: ConstraintKind, value: Any, param: str, style: JsonStyle) -> Constraint:
    if kind is ConstraintKind.JSON_OBJECT and value is not True:
        raise _wrong(param, "must be true or false")
    return Constraint(kind, value, param, style)


def _style(given: Mapping[str, Any], param: str) -> JsonStyle:
    for name in _STYLE:
        if not isinstance(given.get(name, False), bool):
            raise _wrong(f"{param}.{name}", "must be true or false")
    pattern = given.get("whitespace_pattern")
    if pattern is not None and not isinstance(pattern, str):
        raise _wrong(f"{param}.whitespace_pattern", "must be a string")
    any_whitespace, named_only = (given.get(name, False) for name in _STYLE)
    return JsonStyle(not any_whitespace, pattern, named_only)


def _wrong(param: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"`{param}` {reason}.", param=param)
