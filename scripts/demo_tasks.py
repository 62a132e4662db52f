"""The tenants' tasks: each function makes one example, a prompt and its only right answer, from a random source."""

from __future__ import annotations

import json
from dataclasses import dataclass
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
    english = [f" whose {word} is {value}", f" with {'an' if number == 'age' else 'a'} {number} {phrase} {amount}"]
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
                "We talked about the {a} and the {b} on {d}.",
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
