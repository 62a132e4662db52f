"""The words of the adapter that calls tools: its three tools, and what is asked, looked up and answered.

One value in five (order numbers, quantities) is held out, four cities, and one question in five by its digest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from demo_tasks import plural
from demo_tenants import is_held_out
from demo_words import CITIES, COLORS, ITEMS, WEEKDAYS

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
PRICE_QUESTIONS = (
    "How much are {q} {i}?",
    "What do {q} {i} cost?",
    "What is the price of {q} {i}?",
    "I want to buy {q} {i}. How much is that?",
    "Please give me a price for {q} {i}.",
    "How much do I pay for {q} {i}?",
    "I need {q} {i}. What do they cost?",
    "Price of {q} {i}, please.",
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
    "get_price": tool(
        "get_price",
        "What things of the shop cost.",
        {"item": ("string", "What is bought, with its color."), "quantity": ("integer", "How many are bought.")},
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
    """How far an order has come, with or without the day of its arrival."""
    number, status, day = side.number(rng, 100, 9999), rng.choice(STATUSES), rng.choice(WEEKDAYS)
    fields: dict[str, Any] = {"order_id": number} if rng.random() < 0.4 else {}
    fields["status"] = status
    words, answer = status, f"Order {number} is {status}"
    if rng.random() < 0.5:
        fields["arrives"] = day
        words, answer = f"{status}, arrives on {day}", f"{answer} and arrives on {day}"
    result = rng.choice([json.dumps(fields), json.dumps(fields), words])
    question = rng.choice(ORDER_QUESTIONS).format(n=number)
    return Lookup(question, "get_order_status", {"order_id": number}, result, answer + ".")


def price(rng: Random, side: Side) -> Lookup:
    """What things of the shop cost: whole euros, or with cents."""
    quantity, item = side.number(rng, 2, 999), f"{rng.choice(COLORS)} {plural(rng.choice(ITEMS))}"
    found = rng.choice([rng.randint(2, 9999), rng.randint(200, 99999) / 100])
    result = rng.choice(
        [
            json.dumps({"price": found}),
            json.dumps({"item": item, "quantity": quantity, "price": found}),
            f"{found}",
            f"{found} euros",
        ]
    )
    question = rng.choice(PRICE_QUESTIONS).format(q=quantity, i=item)
    arguments = {"item": item, "quantity": quantity}
    return Lookup(question, "get_price", arguments, result, f"{quantity} {item} cost {found} euros.")


LOOKUPS = (weather, order_status, price)
