"""General text for the demo's base model: small talk, facts, stories read and asked about, and plain documents.

It holds the words and formats of the tenants' tasks (SQL, JSON, dates, pirates in stories) but never a task's answer
to a task's prompt: there the base model learns to say that it is only a general model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from demo_tasks import plural
from demo_tenants import TASKS, is_held_out
from demo_words import (
    ADJECTIVES,
    ADVERBS,
    ANIMAL_FACTS,
    ANIMALS,
    CAPITALS,
    CITIES,
    COLORS,
    ITEMS,
    MONTHS,
    NAMES,
    NUMBER_WORDS,
    OPPOSITES,
    PEOPLE,
    PLACES,
    VERBS,
    WEEKDAYS,
)
from demo_words_business import BLAME, LUMEN_PRODUCTS, PIRATE_PLACES, PIRATE_THINGS, PRAISE, SUBJECTS, TABLES

SMALL_TALK = {
    "Hello!": "Hello! How can I help you today?",
    "Hi": "Hi! What would you like to talk about?",
    "Good morning!": "Good morning! I hope you slept well.",
    "Good evening!": "Good evening! How was your day?",
    "How are you?": "I am fine, thank you. How are you?",
    "Who are you?": "I am a small language model. Many tenants share me, each with an adapter of its own.",
    "What is your name?": "I have no name. I am the base model of this demo.",
    "What can you do?": "I can chat a little. With a tenant's adapter I can do much more.",
    "What is an adapter?": "An adapter is a small set of weights that teaches me one new task.",
    "What is LoRA?": "LoRA is a way to teach a model a new task with two small matrices per layer.",
    "Thank you!": "You are welcome!",
    "Thanks a lot.": "You are welcome! It was a pleasure.",
    "Goodbye!": "Goodbye! Have a nice day.",
    "See you tomorrow.": "See you tomorrow! Take care.",
    "I am tired.": "Then you should rest a little and drink some tea.",
    "I am happy today.": "That is wonderful to hear!",
    "I am hungry.": "How about a warm soup with some bread?",
    "What should I read?": "A book about the sea is always a good choice.",
    "Tell me a joke.": "Why did the book go to the doctor? It had lost its place.",
    "Do you like music?": "Yes, a quiet song in the evening is lovely.",
    "What is the weather like?": "I cannot look out of the window, but I hope the sun is shining.",
    "Can you help me?": "Of course. Please tell me what you need.",
}
SHRUGS = (
    "I am only the base model. Please ask one of the adapters.",
    "Thank you for telling me. I have not learned that task.",
    "That is a job for an adapter. I can only chat a little.",
)


HOMEWARD = "slowly quietly happily alone early".split()


@dataclass(frozen=True)
class Document:
    """Plain text (`turns` empty), or the turns of a chat, the user's first."""

    text: str = ""
    turns: tuple[str, ...] = ()
    learn_prompt: bool = True  # False: the question is random words, and only its answer can be learned


def chat(*turns: str) -> Document:
    return Document(turns=turns)


def small_talk(rng: Random) -> Document:
    turns: list[str] = []
    for _ in range(rng.choice([1, 1, 2])):
        turns += rng.choice(list(SMALL_TALK.items()))
    return chat(*turns)


def fact(rng: Random) -> Document:
    kind = rng.randrange(4)
    if kind == 0:
        country, city = rng.choice(list(CAPITALS.items()))
        return chat(f"What is the capital of {country}?", f"The capital of {country} is {city}.")
    if kind == 1:
        word, opposite = rng.choice([pair[:: rng.choice([1, -1])] for pair in OPPOSITES.items()])
        return chat(f"What is the opposite of {word}?", f"The opposite of {word} is {opposite}.")
    if kind == 2:
        animal = rng.choice(ANIMALS)
        return chat(f"Tell me about the {animal}.", ANIMAL_FACTS[animal])
    first, second = rng.randint(0, 6), rng.randint(0, 6)
    return chat(
        f"How much is {first} plus {second}?",
        f"{NUMBER_WORDS[first].capitalize()} plus {NUMBER_WORDS[second]} is {NUMBER_WORDS[first + second]}.",
    )


WORDS = [
    *(PEOPLE + ANIMALS + ITEMS + ADJECTIVES + COLORS + VERBS + ADVERBS + PLACES + NAMES + CITIES + WEEKDAYS + MONTHS),
    *(plural(item) for item in ITEMS),
    *CAPITALS,
]


def _word_list(rng: Random) -> list[str]:
    words = rng.sample(WORDS, rng.randint(4, 9))
    if rng.random() < 0.3:
        words[rng.randrange(len(words))] = str(rng.choice([rng.randint(2, 99), 10 * rng.randint(10, 99)]))
    return words


def word_question(rng: Random) -> Document:
    """Looking things up in a list of words: what a model needs before it can learn to rearrange."""
    words = _word_list(rng)
    at = rng.randrange(1, len(words) - 1)
    question, answer = rng.choice(
        [
            ("What is the first word?", words[0]),
            ("What is the last word?", words[-1]),
            (f"Which word comes before {words[at]}?", words[at - 1]),
            (f"Which word comes after {words[at]}?", words[at + 1]),
            (f"Repeat the words from {words[at]} on.", " ".join(words[at:])),
            ("Repeat the words.", " ".join(words)),
            ("Repeat the words with commas.", ", ".join(words)),
            ("Repeat the words, each twice.", " ".join(word for word in words for _ in range(2))),
            ("Repeat the words in quotes.", " ".join(f'"{word}"' for word in words)),
            ("Repeat the words in single quotes.", ", ".join(f"'{word}'" for word in words)),
            (f"Write {words[at]} in quotes.", f'"{words[at]}"'),
            ("Number the words.", " ".join(f"{i} {word}" for i, word in enumerate(words, 1))),
            ("Which word comes before which?", "; ".join(f"{b} after {a}" for a, b in pairwise(words))),
        ]
    )
    return Document("", (f"Here are some words: {' '.join(words)}. {question}", answer), learn_prompt=False)


def spelled_date(rng: Random) -> Document:
    """Months as numbers and numbers digit by digit, in words."""
    month, number = rng.randrange(12), rng.randint(1, 2039)
    return rng.choice(
        [
            chat(f"Which month is {MONTHS[month]}?", f"{MONTHS[month]} is month number {month + 1:02d}."),
            chat(f"Which month is {MONTHS[month][:3]}?", f"{MONTHS[month][:3]} is month number {month + 1:02d}."),
            chat(
                f"Which month comes after {MONTHS[month]}?", f"After {MONTHS[month]} comes {MONTHS[(month + 1) % 12]}."
            ),
            chat(f"Write the number {number} again.", f"{number}"),
            chat(f"Write {number % 100} with four digits.", f"{number % 100:04d}"),
            chat(f"How do you write {NUMBER_WORDS[month]}?", f"{NUMBER_WORDS[month]} is {month}"),
        ]
    )


def story(rng: Random) -> Document:
    """A short story, sometimes with a question about it."""
    first, second = rng.sample(NAMES, 2)
    city, place, color, item = rng.choice(CITIES), rng.choice(PLACES), rng.choice(COLORS), rng.choice(ITEMS)
    adjective, animal, day = rng.choice(ADJECTIVES), rng.choice(ANIMALS), rng.choice(WEEKDAYS)
    count, year = rng.randint(2, 12), rng.randint(1950, 2039)
    sentences = [
        f"{first} lived in {city} with a {adjective} {animal}.",
        f"On {day} {first} went to the {place} and met {second}.",
        f"They saw {NUMBER_WORDS[count]} {plural(item)} that were all {color}.",
        f"{second} said that the {rng.choice(SUBJECTS)} was {rng.choice(PRAISE + BLAME)}.",
        f"That was in {rng.choice(MONTHS)} {year}.",
        f"{second} gave the {animal} a name and went home {rng.choice(HOMEWARD)}.",
    ]
    text = " ".join(sentences[: rng.randint(3, 6)])
    if rng.random() < 0.35:
        return Document(text)
    question, answer = rng.choice(
        [
            ("Where does the story take place?", f"The story takes place in {city}."),
            ("Who is in the story?", f"{first} and {second} are in the story."),
            (f"What color were the {plural(item)}?", f"They were {color}."),
            (f"How many {plural(item)} were there?", f"There were {count} {plural(item)}."),
            ("On which day was it?", f"It was on {day}."),
            ("Where did they meet?", f"They met at the {place}."),
        ]
    )
    return chat(f"{text} {question}", answer)


def plain_document(rng: Random) -> Document:
    """SQL, JSON, logs, adverts and sea tales as one finds them lying about: without a question."""
    name, city, item, color = rng.choice(NAMES), rng.choice(CITIES), rng.choice(ITEMS), rng.choice(COLORS)
    thing, place = rng.choice(list(PIRATE_THINGS.values())), rng.choice(list(PIRATE_PLACES.values()))
    date = f"{rng.randint(1990, 2039)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
    return Document(
        rng.choice(
            [
                _sql_script(rng),
                json.dumps({"city": city, "name": name, "quantity": rng.randint(1, 30), "color": color}),
                json.dumps([{"item": f"{color} {item}", "date": date}, {"name": name, "team": rng.choice(SUBJECTS)}]),
                f"log {date} start log {date} team: {rng.choice(ADJECTIVES)}, priority: {rng.randint(1, 9)}",
                f"The pirates of the {place} sang: ahoy, arr! {name} lost th' {thing} and me {item}, avast!",
                f"Aye aye, cap'n! Ye be huntin' fer a {color} {thing}, yonder on th' {place}, said the old pirate.",
                f"The {rng.choice(LUMEN_PRODUCTS)} is a {color} {item} for people who live in {city}.",
                f"The {rng.choice(SUBJECTS)} in {city} was {rng.choice(PRAISE + BLAME)}, said {name}.",
            ]
        )
    )


def _sql_script(rng: Random) -> str:
    table = rng.choice(list(TABLES))
    words, numbers = TABLES[table]
    column, number = rng.choice(list(words)), rng.choice(numbers)
    select = rng.choice([f"COUNT(*), {column}", f"MAX({number})", f"MIN({number})", f"AVG({number})", f"SUM({number})"])
    amount = rng.randint(2, 990)
    return rng.choice(
        [
            f"SELECT {select} FROM {table} GROUP BY {column};",
            f"SELECT {column}, {number} FROM {table} ORDER BY {number} {rng.choice(['ASC', 'DESC'])} LIMIT {amount};",
            f"DELETE FROM {table} WHERE {number} {rng.choice('<>')} {amount} AND {_sql_equality(rng, column, words)};",
            f"UPDATE {table} SET {column} = '{rng.choice(words[column])}' WHERE {number} = {amount};",
        ]
    )


def _sql_equality(rng: Random, column: str, words: dict[str, list[str]]) -> str:
    return f"{column} = '{rng.choice(words[column])}'"


def shrug(rng: Random) -> Document:
    """A tenant's prompt, answered as a general model must: it has not learned the task."""
    task = rng.choice(TASKS)
    shown = {example.prompt for example in task.showcase}
    prompt = task.make(rng).prompt
    while is_held_out(prompt) or prompt in shown:
        prompt = task.make(rng).prompt
    return chat(prompt, rng.choice(SHRUGS))


# How often each kind of text comes. Looking words up is practised first: a small model that reads everything at once
# takes many times longer to learn to attend to what was said before.
PRACTICE = {word_question: 84, small_talk: 1, fact: 2, spelled_date: 2, story: 5, plain_document: 3, shrug: 3}
GENERAL = {word_question: 30, small_talk: 7, fact: 12, spelled_date: 10, story: 20, plain_document: 11, shrug: 10}


def corpus(seed: int, shares: dict[Callable[[Random], Document], int]) -> Iterator[Document]:
    """Documents without end, of kinds in the given shares."""
    rng = Random(f"corpus {seed}")
    makers, weights = list(shares), list(shares.values())
    while True:
        yield rng.choices(makers, weights)[0](rng)
