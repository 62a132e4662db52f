"""The form that an answer must have, checked by hand: `response_format`, `structured_outputs`, `guided_*`; tools.

They are looked at only as deep as their own words go: a schema may be as large as a body.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.strict_json import depth_of
from lora_serve.server.schemas.fields import MAX_NAME_LENGTH, Fields, Ignored, ObjectOrNull
from lora_serve.text.grammars import Constraint, ConstraintKind, JsonStyle
from lora_serve.text.past_calls import MAX_NESTING
from lora_serve.text.tool_calls.base import Tool

MAX_DESCRIPTION = 4096  # characters
_KINDS = tuple(ConstraintKind)
_GUIDED = {f"guided_{kind}": kind for kind in _KINDS if kind is not ConstraintKind.STRUCTURAL_TAG}
_STYLE = ("disable_any_whitespace", "disable_additional_properties")
_IGNORED = ("disable_fallback", "backend", "backend_was_auto", "_backend", "_backend_was_auto")
MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")  # as in Anthropic's and OpenAI's Responses
_NO_PARAMETERS = {"type": "object", "properties": {}}
Mode = Literal["none", "auto", "required", "named"]
_log = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that an answer may call, and whether it must."""

    tools: tuple[Tool, ...] = ()
    mode: Mode = "none"
    parallel: bool = True  # more than one call in an answer
    name: str | None = None  # with `named`: the tool that must be called

    @property
    def is_forced(self) -> bool:
        """True if the answer must be a call."""
        return self.mode in ("required", "named")

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools of which one must be called, if the answer must be a call."""
        return tuple(tool for tool in self.tools if self.name in (None, tool.name))

    def for_template(self) -> list[dict[str, Any]]:
        """The tools as chat templates read them, in the form of transformers. `strict` is nothing for the model."""
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters or _NO_PARAMETERS,
                },
            }
            for tool in self.tools
        ]


NO_TOOLS = ToolUse()


def tool_use(tools: Any, choice: Any, parallel: bool) -> ToolUse:
    """Check both fields together; None stands for a field that was left out. Raises InvalidRequestError."""
    parsed = () if tools is None else _parse_tools(tools)
    if choice is None:
        return ToolUse(parsed, "auto" if parsed else "none", parallel)
    mode, names = _parse_choice(choice)
    if mode == "none":
        return ToolUse(parsed, "none", parallel)
    if not parsed and (tools is None or mode != "auto"):
        raise _wrong_choice("`tool_choice` is allowed only beside `tools` that are functions.")
    known = {tool.name for tool in parsed}
    for name in names:
        if name not in known:
            raise _wrong_choice(f"`tool_choice` names the tool {name[:64]!r}, which is no function in `tools`.")
    if mode == "named":
        return ToolUse(parsed, mode, parallel=False, name=names[0])  # once, as in vLLM
    allowed = tuple(tool for tool in parsed if not names or tool.name in names)
    return ToolUse(allowed, mode if allowed else "none", parallel)


def _parse_tools(value: Any) -> tuple[Tool, ...]:
    if not isinstance(value, list):
        raise InvalidRequestError("`tools` must be a list of tools.", param="tools")
    if len(value) > MAX_TOOLS:
        raise InvalidRequestError(f"At most {MAX_TOOLS} tools are allowed (got {len(value)}).", param="tools")
    if depth_of(value) > MAX_NESTING:
        raise InvalidRequestError(f"`tools` is nested more than {MAX_NESTING} deep.", param="tools")
    tools = tuple(_parse_tool(item, f"tools[{index}]") for index, item in enumerate(value) if not is_left_out(item))
    if len(tools) < len(value):
        kinds = sorted({item["type"][:64] for item in value if is_left_out(item)})
        _log.info("tools that are no functions are left out: %s", ", ".join(map(repr, kinds[:8])))
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            where = f"tools[{index}].function.name"
            raise InvalidRequestError(f"`{where}`: a tool named {name} stands before it already.", param=where)
    return tools


def is_left_out(item: Any) -> bool:
    """True for a tool of a kind that callers' own servers have (a search, a shell): a model does without it."""
    kind = item.get("type") if isinstance(item, dict) else None
    return isinstance(kind, str) and kind != "function"


def _parse_tool(item: Any, where: str) -> Tool:
    if not isinstance(item, dict) or item.get("type") not in (None, "function"):
        message = f'`{where}` must be {{"type": "function", "function": ...}}.'
        raise InvalidRequestError(message, param=where)
    function = item.get("function")
    if not isinstance(function, dict):
        message = f"`{where}.function` must be an object with `name`, `description` and `parameters`."
        raise InvalidRequestError(message, param=f"{where}.function")
    where = f"{where}.function"
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"`{where}.name` must have 1 to 128 letters, digits, underscores and hyphens."
        raise InvalidRequestError(message, param=f"{where}.name")
    if not isinstance(description, str | None):
        raise InvalidRequestError(f"`{where}.description` must be a string.", param=f"{where}.description")
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise InvalidRequestError(f"`{where}.strict` must be true or false.", param=f"{where}.strict")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        message = f'`{where}.parameters` must be a JSON schema of the type "object".'
        raise InvalidRequestError(message, param=f"{where}.parameters")
    return Tool(name, description or "", parameters, bool(strict))


def _parse_choice(value: Any) -> tuple[Mode, Sequence[str]]:
    """The mode, and the names that it is limited to; none if it is not limited."""
    if value in ("none", "auto", "required"):
        return value, ()
    if isinstance(value, dict) and value.get("type") == "function":
        return "named", [_name_in(value)]
    allowed = value.get("allowed_tools") if isinstance(value, dict) and value.get("type") == "allowed_tools" else None
    if isinstance(allowed, dict) and allowed.get("mode") in ("auto", "required"):
        listed = allowed.get("tools")
        if isinstance(listed, list) and 0 < len(listed) <= MAX_TOOLS:
            names = [_name_in(item) for item in listed if not is_left_out(item)]
            if names or allowed["mode"] == "auto":
                return allowed["mode"] if names else "none", names
    raise _wrong_choice(
        '`tool_choice` must be "none", "auto", "required", {"type": "function", "function": {"name": ...}}, or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}.'
    )


def _name_in(value: Any) -> str:
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise _wrong_choice('`tool_choice` must name a tool as {"type": "function", "function": {"name": ...}}.')
    return name


def _wrong_choice(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="tool_choice")
