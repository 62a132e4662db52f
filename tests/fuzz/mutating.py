"""Mutations within a form: a tree of JSON's or MessagePack's values is changed, and written out again.

A fuzzer that changes bytes alone hardly ever gets past a checksum, a length or a bracket.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

_PIECES = ("", "a", "0", "-", ".", "/", "\\", "*", "(", ")+", "[", "{", "|", "é", "\0", "\ud800", " ", '"')
Bytes = Callable[[bytes, int], bytes]  # a mutation of bytes: (input, most bytes)
Mutation = Callable[[bytes, int, int, Bytes], bytes]  # with a seed, see `inputs.Target.mutate`
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 255, 2**16, 2**31 - 1, 2**31, -(2**31) - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1,
    -(2**63), 0.0, -0.0, 0.5, 1e6, 1e308, 5e-324, "", "a", "\0", "é", "\ud800", "😀", "a" * 300, [], {}, [[]], [None],
    {"": None}, {"a": []}, [0, 0], ["a", "a"],
)  # fmt: skip


def within(load: Callable[[bytes], Any], dump: Callable[[Any], bytes], words: tuple[str, ...] = ()) -> Mutation:
    """Of what `load` makes a tree of; `words` are names that the form knows."""

    def mutate(data: bytes, max_bytes: int, seed: int, mutate_bytes: Bytes) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.25:
            return mutate_bytes(data, max_bytes)
        try:
            tree = load(data)
            for _ in range(rng.choice((1, 1, 1, 2, 4))):
                tree = changed(tree, rng, words)
            made = dump(tree)
        except Exception:  # it has not the form
            return mutate_bytes(data, max_bytes)
        return made if len(made) <= max_bytes else mutate_bytes(data, max_bytes)

    return mutate


def either(*mutations: Mutation) -> Mutation:
    """One of them, by the seed."""
    return lambda data, most, seed, mutate_bytes: random.Random(~seed).choice(mutations)(data, most, seed, mutate_bytes)


def written(tree: Any) -> bytes:
    """The tree as JSON; halves of surrogate pairs stay."""
    return json.dumps(tree).encode()


JSON: Mutation = within(json.loads, written)


def changed(tree: Any, rng: random.Random, words: tuple[str, ...] = ()) -> Any:
    """The tree with one change at a place that chance chooses."""
    tree = [copy.deepcopy(tree)]
    places = list(_places(tree))
    inside, key = rng.choice(places)
    value = inside[key]
    match rng.randrange(10):
        case 0 | 1:
            inside[key] = copy.deepcopy(rng.choice(VALUES))
        case 2:
            other, at = rng.choice(places)
            inside[key] = copy.deepcopy(other[at])
        case 3 if inside is not tree:
            del inside[key]
        case 4:
            inside[key] = [value] if rng.random() < 0.5 else {rng.choice(words or ("a",)): value}
        case 5 | 6 if isinstance(inside, dict):
            inside[_other_text(str(key), rng, words)] = inside[key] if rng.random() < 0.5 else inside.pop(key)
        case 5 if isinstance(inside, list) and inside is not tree:
            inside.insert(key, copy.deepcopy(value))
        case _:
            inside[key] = _nudged(value, rng, words)
    return tree[0]


def _places(tree: Any) -> Any:
    """(list or object, key) of every value."""
    left = [tree]
    while left:
        inside = left.pop()
        for key in range(len(inside)) if isinstance(inside, list) else list(inside):
            yield inside, key
            if isinstance(inside[key], list | dict):
                left.append(inside[key])


def _nudged(value: Any, rng: random.Random, words: tuple[str, ...]) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return value + rng.choice((-1, 1, value, -2 * value, 4, -4, 1 << rng.randrange(64)))
        case float():
            return value * rng.choice((-1.0, 2.0, 0.5, 1e6))
        case str():
            return _other_text(value, rng, words)
        case bytes():
            return value[: rng.randrange(len(value) + 1)] + rng.randbytes(rng.randrange(8))
        case list() if value:
            return value * rng.choice((2, 3, 20)) if rng.random() < 0.5 else value[::-1]
    return copy.deepcopy(rng.choice(VALUES))


def _other_text(text: str, rng: random.Random, words: tuple[str, ...]) -> str:
    if words and rng.random() < 0.4:
        return rng.choice(words)
    at = rng.randrange(len(text) + 1)
    piece = rng.choice(
        ("", "a", "0", "-", ".", "/", "\\", "*", "(", ")+", "[", "{", "|", "é", "\0", "\ud800", " ", '"')
    )
    return text[:at] + piece + text[at + rng.randrange(3) :]
