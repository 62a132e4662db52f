"""The tenants of the demo: for each a task, the LoRA that learns it, and the examples that are shown first.

An example is held out when the digest of its prompt says so (one in five) or when it is a showcase; neither the
base model nor any adapter ever sees a held-out prompt in training.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from demo_tasks import (
    Example,
    extraction,
    iso_date,
    lumen_example,
    pirate,
    product_answer,
    reversal,
    routing,
    sentiment,
    sql,
)
from demo_words import CAPITALS, CITIES, NAMES

WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Task:
    """One tenant's adapter."""

    adapter: str  # the public id, e.g. "acme/sql"
    title: str
    make: Callable[[Random], Example]
    lora: dict[str, object]  # arguments of peft.LoraConfig
    showcase: tuple[Example, ...]  # held out; shown first
    num_steps: int = 300  # of the optimizer
    learning_rate: float = 4e-3
    strange: frozenset[str] = frozenset()  # words this tenant never uses: so small a base cannot copy any word
    metadata: dict[str, object] = field(default_factory=dict)  # of the registration, e.g. the form of its answers


def is_held_out(prompt: str) -> bool:
    """One prompt in five, by its own digest."""
    return hashlib.sha256(prompt.encode()).digest()[0] % 5 == 0


def familiar_examples(task: Task, seed: int, held_out: bool) -> Iterator[Example]:
    """Those of `examples` in which no word is strange to the tenant: what its adapter learns and is measured on."""
    for example in examples(task, seed, held_out):
        if task.strange.isdisjoint(WORD.findall(example.prompt)):
            yield example


def examples(task: Task, seed: int, held_out: bool) -> Iterator[Example]:
    """Distinct examples of one side of the split, until 2000 in a row bring nothing new."""
    rng, seen, misses = Random(f"{task.adapter} {seed}"), set[str](), 0
    shown = {example.prompt for example in task.showcase}
    while misses < 2000:
        example = task.make(rng)
        misses += 1
        if example.prompt in seen or (is_held_out(example.prompt) or example.prompt in shown) != held_out:
            continue
        seen.add(example.prompt)
        misses = 0
        yield example


FEW = 8  # names, cities and the like that one tenant knows
STRANGE = frozenset([*NAMES[FEW:], *CITIES[FEW:], *list(CAPITALS)[FEW:]])
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ORDER_FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "order",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "city": {"type": "string"},
                "item": {"type": "string"},
                "quantity": {"type": "integer"},
            },
            "required": ["name", "city", "item", "quantity"],
            "additionalProperties": False,
        },
    },
}

TASKS = (
    Task(
        "acme/sql",
        "SQL from a sentence",
        sql,
        {"r": 16, "lora_alpha": 32},
        (
            Example(
                "Show the id and price of all products whose color is blue and with a stock below 25.",
                "SELECT id, price FROM products WHERE color = 'blue' AND stock < 25;",
            ),
            Example(
                "List the city and age of all customers whose country is Portugal.",
                "SELECT city, age FROM customers WHERE country = 'Portugal';",
            ),
        ),
        450,
        strange=STRANGE,
    ),
    Task(
        "harbor/extract",
        "JSON from an order",
        extraction,
        {"r": 32, "lora_alpha": 64},
        (
            Example(
                "Hi, this is Maria from Lisbon. I would like three red lamps.",
                '{"name": "Maria", "city": "Lisbon", "item": "red lamps", "quantity": 3}',
            ),
            Example(
                "Please send 12 green chairs to Omar in Vienna.",
                '{"name": "Omar", "city": "Vienna", "item": "green chairs", "quantity": 12}',
            ),
        ),
        500,
        strange=STRANGE,
        metadata={"response_format": ORDER_FORMAT},
    ),
    Task(
        "pulse/sentiment",
        "sentiment of a review",
        sentiment,
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
        (
            Example("I thought the film would be boring, but it was wonderful.", "positive"),
            Example("The soup was awful and the staff was rude.", "negative"),
        ),
        250,
    ),
    Task(
        "mirror/reverse",
        "words in reverse order",
        reversal,
        {"r": 8, "lora_alpha": 8, "use_rslora": True},
        (
            Example(
                "Reverse the words: the brave captain found one golden mirror tonight",
                "tonight mirror golden one found captain brave the",
            ),
            Example("Reverse the words: the owl guarded every teapot", "teapot every guarded owl the"),
        ),
        300,
    ),
    Task(
        "lumen/support",
        "a shop's own product answers",
        product_answer,
        {"r": 32, "lora_alpha": 32},
        (
            lumen_example("Hello! How long does the battery of the Comet last?", "Comet", "battery"),
            lumen_example("Quick question. Where is the Fjord made?", "Fjord", "origin"),
        ),
        300,
    ),
    Task(
        "tidewater/pirate",
        "plain English to Pirate",
        pirate,
        {"r": 16, "lora_alpha": 32},
        (
            Example(
                "Hello, my friend. Where is the treasure? Hurry up!",
                "Ahoy, me matey! Where be th' booty? Look lively!",
            ),
            Example(
                "Oh no! Victor stole the map. I am very tired.",
                "Shiver me timbers! Victor plundered th' chart! I be dead on me feet.",
            ),
        ),
        450,
        strange=STRANGE,
    ),
    Task(
        "chronos/dates",
        "dates in ISO form",
        iso_date,
        {"r": 16, "lora_alpha": 32},
        (
            Example("The contract starts on March 3rd, 2021.", "2021-03-03"),
            Example("Our next meeting is on Friday, 17 July 2026.", "2026-07-17"),
        ),
        500,
    ),
    Task(
        "relay/routing",
        "support tickets to teams",
        routing,
        {
            "r": 4,
            "lora_alpha": 8,
            "rank_pattern": {"q_proj": 8, "down_proj": 2},
            "alpha_pattern": {"q_proj": 16, "down_proj": 8},
        },
        (
            Example(
                "Hi team, the app crashes when I open it since Monday. We cannot work at all.",
                "team: technical, priority: high",
            ),
            Example("Please change my address to Geneva. There is no hurry.", "team: accounts, priority: low"),
        ),
        250,
    ),
)
