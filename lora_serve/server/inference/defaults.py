"""An adapter's own defaults for requests that leave fields out: a part of its registration's metadata.

They are the adapter id's, whichever of its versions answers. They count for requests that name this one adapter;
adapters that are composed have none. If another answers for it (`on_cold`), they count all the same, as the caller
asked for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.setting_groups.http import RequestLimits
from lora_serve.core.setting_types import ReasoningFormatName, ToolCallFormatName
from lora_serve.server.json_body import check_fields
from lora_serve.server.schemas.constraints import StructuredFields
from lora_serve.server.schemas.fields import DEFAULT_LIMITS, Fields, without_null
from lora_serve.server.schemas.inference import CompletionFields, SamplingFields

SAMPLING_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "ignore_eos",
)


class DefaultsFields(Fields):
    """All names of metadata that are read here; a null is as if it were left out."""

    response_format: dict[str, Any] | None = None
    sampling: dict[str, Any] | None = None
    tool_call_parser: ToolCallFormatName | None = None
    reasoning_parser: ReasoningFormatName | None = None


def check_sampling(sampling: Mapping[str, Any] | None, limits: RequestLimits | None = None) -> dict[str, Any]:
    """The checked values, as a request would have them. Raises InvalidRequestError naming the field."""
    given: dict[str, Any] = without_null(dict(sampling or {}))
    for name in given:
        if name not in SAMPLING_NAMES:
            raise InvalidRequestError(
                f"`sampling` may not hold `{name[:64]}`; it may hold {', '.join(SAMPLING_NAMES)}.",
                param=f"sampling.{name[:64]}",
            )
    try:
        fields = CompletionFields.model_validate({"prompt": "", **given}, context=limits or DEFAULT_LIMITS)
    except ValidationError as error:
        item = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, item["loc"]))
        message = f"`sampling.{where}`: {item['msg'].removeprefix('Value error, ')}"
        raise InvalidRequestError(message, param=f"sampling.{where}") from None
    if given.get("max_tokens") == 0:
        raise InvalidRequestError("`sampling.max_tokens` must be at least 1.", param="sampling.max_tokens")
    return {name: getattr(fields, name) for name in given}


F = TypeVar("F", bound=SamplingFields)
NAMES = tuple(DefaultsFields.model_fields)
MAX_TOKENS_NAMES = frozenset(("max_tokens", "max_completion_tokens"))
_ELSEWHERE = {
    **dict.fromkeys(SAMPLING_NAMES, "`sampling`"),
    "max_completion_tokens": "`sampling.max_tokens`",
    "stop_sequences": "`sampling.stop`",
    **dict.fromkeys((*StructuredFields.model_fields, "json_schema"), "`response_format`"),
    **dict.fromkeys(("tool_parser", "tool_call_format"), "`tool_call_parser`"),
    "reasoning_format": "`reasoning_parser`",
    "defaults": ", ".join(f"`{name}`" for name in NAMES),
}  # names that look like defaults, and where those stand
# A request that asks for an output of its own form has no use for the adapter's.
_OWN_FORM = frozenset(StructuredFields.model_fields)


@dataclass(frozen=True, slots=True)
class RequestDefaults:
    """The defaults, checked; a field that is None, or not in `sampling`, has the API's own default."""

    response_format: Mapping[str, Any] | None = None  # as in a request
    sampling: Mapping[str, Any] = field(default_factory=dict)  # values of SamplingFields, by name
    max_tokens: int | None = None  # or as many as the prompt leaves room for
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None

    def applied_to(self, fields: F) -> F:
        """`fields` with the defaults for those that the request left out, or gave as null; all but `max_tokens`."""
        given = fields.model_fields_set
        changes = {name: value for name, value in self.sampling.items() if name not in given}
        if self.response_format is not None and not given & _OWN_FORM and not _may_call_tools(fields):
            changes["response_format"] = self.response_format
        known = type(fields).model_fields
        changes = {name: value for name, value in changes.items() if name in known}
        return fields.model_copy(update=changes) if changes else fields

    def card(self) -> dict[str, Any] | None:
        """The defaults as metadata would give them; None if there are none."""
        sampling = dict(self.sampling) | ({} if self.max_tokens is None else {"max_tokens": self.max_tokens})
        shown = {
            "response_format": self.response_format,
            "sampling": sampling or None,
            "tool_call_parser": self.tool_call_parser,
            "reasoning_parser": self.reasoning_parser,
        }
        return {name: value for name, value in shown.items() if value is not None} or None


NO_DEFAULTS = RequestDefaults()


def read_defaults(metadata: Mapping[str, Any] | None, limits: RequestLimits | None = None) -> RequestDefaults:
    """The defaults that an adapter's metadata holds. Raises InvalidRequestError naming the field."""
    given = {name: metadata[name] for name in NAMES if metadata.get(name) is not None} if metadata else {}
    if not given:
        return NO_DEFAULTS
    try:
        fields = check_fields(DefaultsFields, given)
        values = check_sampling(fields.sampling, limits)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"metadata: {error}", param=f"metadata.{error.param}") from None
    max_tokens = values.pop("max_tokens", None)
    return RequestDefaults(fields.response_format, values, max_tokens, fields.tool_call_parser, fields.reasoning_parser)


def known_defaults(metadata: Mapping[str, Any], limits: RequestLimits | None = None) -> RequestDefaults:
    """The same for a registered adapter: of metadata that was never meant so, from before there were defaults, none."""
    try:
        return read_defaults(metadata, limits)
    except InvalidRequestError:
        return NO_DEFAULTS


def metadata_warnings(metadata: Mapping[str, Any]) -> list[str]:
    """A warning for each name that looks like a default and is none where it stands."""
    found = [name for name in _ELSEWHERE if metadata.get(name) is not None and name not in NAMES] if metadata else []
    return [f"`{name}` in its metadata is a note: defaults stand in {_ELSEWHERE[name]}." for name in found]


def _may_call_tools(fields: SamplingFields) -> bool:
    return bool(getattr(fields, "tools", None)) and getattr(fields, "tool_choice", None) != "none"
