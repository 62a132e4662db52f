"""The part of an adapter's metadata that says how requests are answered: `response_format`, `sampling`, parsers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.extensions import ReasoningFormatName, ToolCallFormatName
from lora_serve.core.setting_groups.http import RequestLimits
from lora_serve.server.schemas.fields import DEFAULT_LIMITS, Fields, without_null
from lora_serve.server.schemas.generation import CompletionFields

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
