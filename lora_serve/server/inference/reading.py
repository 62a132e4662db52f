"""The way in which the text of a chat's answer is read: calls of tools, in the model's format.

The format is the one that the settings name, else the one that the chat template shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.background.tasks import LONG
from lora_serve.server.inference.prompts import thread_if_long
from lora_serve.server.inference.resolve import ResolvedModel
from lora_serve.server.schemas.generation import ChatFields
from lora_serve.server.schemas.tools import NO_TOOLS, ToolUse, tool_use
from lora_serve.server.services import Services
from lora_serve.text.tool_calls import tool_call_format
from lora_serve.text.tool_calls.base import ToolCallFormat


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """The tools and the format of their calls in one answer."""

    tools: ToolUse
    calls: ToolCallFormat
    short_ids: bool = False  # of calls, see `ToolForms`

    @property
    def markers(self) -> tuple[str, ...]:
        """Control tokens that must stay in the text until it is read."""
        return self.calls.markers


async def asked_tools(fields: ChatFields) -> ToolUse:
    """Check the tools of a request. Raises InvalidRequestError."""
    if fields.tools is None and fields.tool_choice is None:
        return NO_TOOLS
    return await thread_if_long(
        amount_of((fields.tools, fields.tool_choice)),
        lambda: tool_use(fields.tools, fields.tool_choice, fields.parallel_tool_calls),
    )


def answer_reading(services: Services, model: ResolvedModel, tools: ToolUse) -> AnswerReading | None:
    """The reading of an answer; None if its text is the content. Raises InvalidRequestError."""
    if tools.mode == "none":
        return None
    return AnswerReading(tools, _call_format(services, model), model.text.template.tool_forms.short_ids)


def amount_of(value: Any) -> int:
    """Characters and values in a value of JSON, in the units of LONG; counted no further than a little above LONG."""
    amount, waiting = 0, [value]
    while waiting and amount <= LONG:
        item = waiting.pop()
        amount += len(item) if isinstance(item, str) else 10
        if isinstance(item, Mapping):
            amount += 10 * len(item)
            waiting.extend(item.values())
        elif isinstance(item, list | tuple):
            waiting.extend(item)
    return amount


def _call_format(services: Services, model: ResolvedModel) -> ToolCallFormat:
    name = services.config.tool_call_parser
    found = model.text.template.call_format if name == "auto" else None if name == "none" else tool_call_format(name)
    if found is None:
        raise InvalidRequestError(
            "No format of tool calls is known for this model: its chat template shows none. Whoever runs the server "
            "names it with --tool-call-parser.",
            param="tools",
        )
    return found
