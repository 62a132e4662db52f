"""The two-step task for clients that call tools; the demo's adapter for tools has been trained on its kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

MODEL = "summit/tools"
QUESTION = "Where is my order 8274?"
STATUS = "open"


def get_weather(city: str) -> str:
    """Tells the weather in a city."""
    raise AssertionError(f"nobody asked for the weather in {city}")


def get_order_status(order_id: int) -> str:
    """Tells the status of an order."""
    assert order_id == 8274, order_id
    return json.dumps({"order_id": order_id, "status": STATUS})


def typed_tools() -> list[Callable[..., str]]:
    """The tools as functions, for clients that read signatures."""
    return [get_weather, get_order_status]


def _tool(function: Callable[..., str], name: str, kind: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {name: {"type": kind}}, "required": [name]}
    described = {"name": function.__name__, "description": function.__doc__, "parameters": schema}
    return {"type": "function", "function": described}


TOOLS: list[Any] = [_tool(get_weather, "city", "string"), _tool(get_order_status, "order_id", "integer")]


def answer_of_tool(name: str, arguments: dict[str, Any]) -> str:
    """The result of a tool."""
    return {"get_weather": get_weather, "get_order_status": get_order_status}[name](**arguments)


def is_answered(text: str) -> bool:
    """True if the final answer holds the tool's result."""
    return STATUS in text and "8274" in text
