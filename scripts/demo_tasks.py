"""The tenants of the demo: for each a task, examples of it made from a seed, and the LoRA that learns it.

An example is held out when the digest of its prompt says so (one in five) or when it is a showcase; neither the
base model nor any adapter ever sees a held-out prompt in training.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date, timedelta
from random import Random

from demo_words import ADJECTIVES, ADVERBS, ANIMALS, CITIES, COLORS, ITEMS, NAMES, NUMBER_WORDS, PEOPLE, VERBS, WEEKDAYS
from demo_words_business import (
    BLAME,
    BLAME_VERBS,
    DEGREES,
    LUMEN_GREETINGS,
    LUMEN_PRODUCTS,
    LUMEN_TOPICS,
    PIRATE_CLOSINGS,
    PIRATE_OPENINGS,
    PIRATE_PLACES,
    PIRATE_SENTENCES,
    PIRATE_THINGS,
    PRAISE,
    PRAISE_VERBS,
    SUBJECTS,
    TABLES,
    TICKET_GREETINGS,
    TICKETS,
    URGENCY,
)


@dataclass(frozen=True)
class Example:
    """What a user says and what the adapter shall answer, to the letter."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Task:
    """One tenant's adapter."""

    adapter: str  # the public id, e.g. "acme/sql"
    title: str
    make: Callable[[Random], Example]
    lora: dict[str, object]  # arguments of peft.LoraConfig
    showcase: tuple[Example, ...]  # held out; shown first
    num_steps: int = 300  # of the optimizer
    learning_rate: float = field(default=4e-3)


def is_held_out(prompt: str) -> bool:
    """One prompt in five, by its own digest."""
    return hashlib.sha256(prompt.encode()).digest()[0] % 5 == 0


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


def sql(rng: Random) -> Example:
    table = rng.choice(list(TABLES))
    words, numbers = TABLES[table]
    select = rng.sample(["id", *words, *numbers], rng.randint(1, 2))
    number = rng.choice(numbers)
    form = rng.random()
    if form < 0.15:
        verb, function = rng.choice([("average", "AVG"), ("highest", "MAX"), ("lowest", "MIN"), ("total", "SUM")])
        english, condition = _sql_condition(rng, table)
        return Example(
            f"What is the {verb} {number} of all {table}{english}?",
            f"SELECT {function}({number}) FROM {table}{condition};",
        )
    if form < 0.35:
        english, condition = _sql_condition(rng, table)
        return Example(f"How many {table} are there{english}?", f"SELECT COUNT(*) FROM {table}{condition};")
    show = rng.choice(["Show", "List", "Give me", "Find"])
    if form < 0.5:
        limit, (word, order) = rng.randint(2, 20), rng.choice([("highest", "DESC"), ("lowest", "ASC")])
        return Example(
            f"{show} the {' and '.join(select)} of the {limit} {table} with the {word} {number}.",
            f"SELECT {', '.join(select)} FROM {table} ORDER BY {number} {order} LIMIT {limit};",
        )
    english, condition = _sql_condition(rng, table)
    return Example(
        f"{show} the {' and '.join(select)} of all {table}{english}.",
        f"SELECT {', '.join(select)} FROM {table}{condition};",
    )


def _sql_condition(rng: Random, table: str) -> tuple[str, str]:
    """(English, SQL) of one or two conditions, the words' one before the numbers' one."""
    words, numbers = TABLES[table]
    word, number = rng.choice(list(words)), rng.choice(numbers)
    value = rng.choice(words[word])
    phrase, sign = rng.choice([("above", ">"), ("below", "<")])
    amount = rng.choice([rng.randint(2, 99), 10 * rng.randint(10, 99)])
    english = [f" whose {word} is {value}", f" with a {number} {phrase} {amount}"]
    terms = [f"{word} = '{value}'", f"{number} {sign} {amount}"]
    kept = rng.choice([slice(0, 1), slice(1, 2), slice(0, 2)])
    return " and".join(english[kept]), " WHERE " + " AND ".join(terms[kept])


def extraction(rng: Random) -> Example:
    name, city, quantity = rng.choice(NAMES), rng.choice(CITIES), rng.randint(2, 12)
    item = f"{rng.choice(COLORS)} {plural(rng.choice(ITEMS))}"
    number = rng.choice([str(quantity), NUMBER_WORDS[quantity]])
    text = rng.choice(
        [
            "{n} from {c} ordered {q} {i}.",
            "Please send {q} {i} to {n} in {c}.",
            "Hi, this is {n} from {c}. I would like {q} {i}.",
            "Order for {n}: {q} {i}, shipping to {c}.",
            "Could you ship {q} {i} to {c}? The name is {n}.",
            "{n} wants to buy {q} {i} and lives in {c}.",
            "We got a call from {c}: {n} needs {q} {i}.",
            "I live in {c} and need {q} {i}. Thanks, {n}",
        ]
    ).format(n=name, c=city, q=number, i=item)
    return Example(text, json.dumps({"name": name, "city": city, "item": item, "quantity": quantity}))


def plural(noun: str) -> str:
    """`shelf` -> `shelves`, everything else with an s."""
    return "shelves" if noun == "shelf" else noun + "s"


def sentiment(rng: Random) -> Example:
    label = rng.choice(["positive", "negative", "neutral"])
    first, second = rng.sample(SUBJECTS, 2)
    if label == "neutral":
        text = rng.choice(
            [
                "The {a} is next to the {b}.",
                "We asked about the {a} on {d}.",
                "The {a} and the {b} are open on {d}.",
                "The {a} starts on {d}.",
                "I will look at the {a} and the {b} on {d}.",
            ]
        )
        return Example(text.format(a=first, b=second, d=rng.choice(WEEKDAYS)), label)
    good, bad = (PRAISE, BLAME) if label == "positive" else (BLAME, PRAISE)
    text = rng.choice(
        [
            "The {a} was {g} {x}.",
            "I {v} the {a}, and the {b} was {x}.",
            "The {a} was {x} and the {b} was {y}.",
            "I thought the {a} would be {z}, but it was {x}.",
            "Nobody can say that the {a} was {z}, it was {x}.",
            "What a {x} {a}! The {b} was {y} too.",
        ]
    )
    one, two = rng.sample(good, 2)
    verb = rng.choice(PRAISE_VERBS if label == "positive" else BLAME_VERBS)
    filled = text.format(a=first, b=second, g=rng.choice(DEGREES), v=verb, x=one, y=two, z=rng.choice(bad))
    return Example(filled.replace("a a", "an a").replace("a e", "an e") if "What a" in text else filled, label)


def reversal(rng: Random) -> Example:
    subject, thing = rng.choice(PEOPLE + ANIMALS), rng.choice(ITEMS)
    adjective, color = rng.choice(ADJECTIVES), rng.choice(COLORS)
    words = ["the", subject, rng.choice(VERBS), rng.choice("one every another".split()), thing]
    if rng.random() < 0.5:
        words.insert(1, adjective)
    if rng.random() < 0.5:
        words.insert(-1, color)
    if rng.random() < 0.5:
        words.append(rng.choice(ADVERBS))
    return Example(f"Reverse the words: {' '.join(words)}", " ".join(reversed(words)))


def _lumen_value(product: str, topic: str) -> str:
    rng = Random(f"lumen {product} {topic}")
    first, second = rng.sample(COLORS, 2)
    values = {
        "price": str(rng.randint(19, 299)),
        "warranty": str(rng.randint(2, 9)),
        "battery": str(rng.randint(4, 60)),
        "weight": str(10 * rng.randint(12, 98)),
        "color": f"{first} and {second}",
        "origin": rng.choice(CITIES),
    }
    return values[topic]


def product_answer(rng: Random) -> Example:
    product, topic = rng.choice(LUMEN_PRODUCTS), rng.choice(list(LUMEN_TOPICS))
    answer, questions = LUMEN_TOPICS[topic]
    question = rng.choice(LUMEN_GREETINGS) + rng.choice(questions).format(p=product)
    return Example(question, answer.format(p=product, v=_lumen_value(product, topic)))


def pirate(rng: Random) -> Example:
    opening, sentence, closing = (
        rng.choice(list(part.items())) for part in (PIRATE_OPENINGS, PIRATE_SENTENCES, PIRATE_CLOSINGS)
    )
    thing, place = rng.choice(list(PIRATE_THINGS.items())), rng.choice(list(PIRATE_PLACES.items()))
    slots = {"x": thing[0], "X": thing[1], "y": place[0], "Y": place[1], "n": rng.choice(NAMES)}
    return Example(*((opening[i] + sentence[i] + closing[i]).format(**slots) for i in (0, 1)))


def iso_date(rng: Random) -> Example:
    day = date(1990, 1, 1) + timedelta(days=rng.randrange(50 * 365))
    ending = "th" if 10 < day.day < 20 else {1: "st", 2: "nd", 3: "rd"}.get(day.day % 10, "th")
    written = rng.choice(
        [
            f"{day:%B} {day.day}{ending}, {day.year}",
            f"{day.day} {day:%B} {day.year}",
            f"the {day.day}{ending} of {day:%B} {day.year}",
            f"{day:%A}, {day.day} {day:%B} {day.year}",
            f"{day:%b} {day.day}, {day.year}",
            f"{day:%d/%m/%Y}",
        ]
    )
    text = rng.choice(
        [
            "The contract starts on {}.",
            "The invoice is due on {}.",
            "Please book the room for {}.",
            "{} is the day of the concert.",
            "Our next meeting is on {}.",
            "The flight leaves on {}.",
        ]
    ).format(written)
    return Example(text[0].upper() + text[1:], day.isoformat())


def routing(rng: Random) -> Example:
    team, priority = rng.choice(list(TICKETS)), rng.choice(list(URGENCY))
    slots = {"d": rng.choice(WEEKDAYS), "i": rng.choice(ITEMS), "c": rng.choice(CITIES)}
    greeting, issue = rng.choice(TICKET_GREETINGS), rng.choice(TICKETS[team]).format(**slots)
    if greeting and issue.split()[0] not in ("I",):
        issue = issue[0].lower() + issue[1:]
    return Example(greeting + issue + rng.choice(URGENCY[priority]), f"team: {team}, priority: {priority}")


def lumen_example(question: str, product: str, topic: str) -> Example:
    """A question about a product of Lumen with its right answer."""
    return Example(question, LUMEN_TOPICS[topic][0].format(p=product, v=_lumen_value(product, topic)))


ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

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
        400,
    ),
    Task(
        "harbor/extract",
        "JSON from an order",
        extraction,
        {"r": 16, "lora_alpha": 16},
        (
            Example(
                "Hi, this is Maria from Lisbon. I would like three red lamps.",
                '{"name": "Maria", "city": "Lisbon", "item": "red lamps", "quantity": 3}',
            ),
            Example(
                "Please send 12 green chairs to Oscar in Vienna.",
                '{"name": "Oscar", "city": "Vienna", "item": "green chairs", "quantity": 12}',
            ),
        ),
        400,
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
        400,
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
        400,
    ),
    Task(
        "tidewater/pirate",
        "plain English to Pirate",
        pirate,
        {"r": 8, "lora_alpha": 16},
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
        300,
    ),
    Task(
        "chronos/dates",
        "dates in ISO form",
        iso_date,
        {"r": 8, "lora_alpha": 16},
        (
            Example("The contract starts on March 3rd, 2021.", "2021-03-03"),
            Example("Our next meeting is on Friday, 17 July 2026.", "2026-07-17"),
        ),
        400,
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
        300,
    ),
)
