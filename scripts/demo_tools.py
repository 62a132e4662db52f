"""The words of the adapter that calls tools: its two tools, and what is asked, looked up and answered.

One order number in five is held out, four cities are, and one question in five is, by its digest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from demo_tenants import is_held_out
from demo_words import CITIES

UNSEEN_CITIES = ("Geneva", "Porto", "Naples", "Seville")  # in no conversation that is learned
SEEN_CITIES = tuple(city for city in CITIES if city not in UNSEEN_CITIES)
SKIES = "bright grey rainy cold warm".split()
STATUSES = "open packed shipped late lost".split()

WEATHER_QUESTIONS = (
    "What is the weather in {c}?",
    "What is the weather like in {c}?",
    "How is the weather in {c} today?",
    "Tell me the weather in {c}.",
    "Is it warm in {c}?",
    "I am going to {c}. How is the weather there?",
    "Do I need an umbrella in {c}?",
    "Weather in {c}, please.",
    "What's the weather in {c}?",
    "Please look up the weather in {c}.",
)
ORDER_QUESTIONS = (
    "Where is my order {n}?",
    "Where is order {n}?",
    "What is the status of order {n}?",
    "Has order {n} been shipped?",
    "My order number is {n}. Where is it?",
    "Please look up order {n}.",
    "I am waiting for order {n}.",
    "Is order {n} on its way?",
    "Can you tell me about my order {n}?",
    "Status of order {n}, please.",
)


def tool(name: str, description: str, parameters: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """A tool as OpenAI's clients send it; each parameter has a type and a description, and all are required."""
    properties = {key: {"type": kind, "description": meaning} for key, (kind, meaning) in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = {
    "get_weather": tool("get_weather", "The weather in a city now.", {"city": ("string", "The city's name.")}),
    "get_order_status": tool(
        "get_order_status", "How far an order has come.", {"order_id": ("integer", "The order's number.")}
    ),
}


@dataclass(frozen=True)
class Lookup:
    """One thing to look up: the question, the call, what the tool says, the answer in words."""

    question: str
    tool: str
    arguments: dict[str, Any]
    result: str
    answer: str


@dataclass(frozen=True)
class Side:
    """One side of the split."""

    cities: Sequence[str]
    is_held_out: bool

    def number(self, rng: Random, low: int, high: int) -> int:
        """A number of this side."""
        number = rng.randint(low, high)
        while is_held_out(str(number)) != self.is_held_out:
            number = rng.randint(low, high)
        return number

    def lookup(self, rng: Random, make: Callable[[Random, Side], Lookup] | None = None) -> Lookup:
        """One whose values and question are of this side; of any tool if `make` is None."""
        while True:
            found = (make or rng.choice(LOOKUPS))(rng, self)
            if is_held_out(found.question) == self.is_held_out:
                return found


LEARNED = Side(SEEN_CITIES, False)
HELD_OUT = Side(SEEN_CITIES, True)
UNSEEN = Side(UNSEEN_CITIES, True)


def weather(rng: Random, side: Side) -> Lookup:
    """The weather in a city; the tool says it as JSON or in words."""
    city, degrees, sky = rng.choice(side.cities), rng.randint(-9, 38), rng.choice(SKIES)
    result = rng.choice(
        [
            json.dumps({"temperature": degrees, "sky": sky}),
            json.dumps({"city": city, "temperature": degrees, "sky": sky}),
            f"{degrees} degrees and {sky}",
            f"It is {sky} and {degrees} degrees in {city}.",
        ]
    )
    question = rng.choice(WEATHER_QUESTIONS).format(c=city)
    return Lookup(question, "get_weather", {"city": city}, result, f"It is {degrees} degrees and {sky} in {city}.")


def order_status(rng: Random, side: Side) -> Lookup:
    """How far an order has come."""
    number, status = side.number(rng, 100, 9999), rng.choice(STATUSES)
    result = rng.choice([json.dumps({"status": status}), json.dumps({"order_id": number, "status": status}), status])
    question = rng.choice(ORDER_QUESTIONS).format(n=number)
    return Lookup(question, "get_order_status", {"order_id": number}, result, f"Order {number} is {status}.")


LOOKUPS = (weather, order_status)
