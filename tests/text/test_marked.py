"""A marked text answers as the text does, and gives nothing of it away without its marks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.text.marked import Marked, Marks, joined, true_text

TEXTS = st.text(alphabet="<|>aAß b\n\u00e9", max_size=12)
PARTS = st.text(alphabet="<|>y \n", max_size=3)
NUMBERS = st.integers(-3, 14)
HIDDEN = frozenset("<|>aA")

ASKED: dict[str, Callable[[str, str, int], Any]] = {
    "in": lambda text, part, _: part in text,
    "==": lambda text, part, _: (text == part, part == text, text != part, text in [part], {part: 1}.get(text)),
    "<": lambda text, part, _: (text < part, text <= part, text > part, text >= part),
    "find": lambda text, part, number: (text.find(part), text.rfind(part, number), text.count(part)),
    "startswith": lambda text, part, _: (text.startswith(part), text.endswith(part), text.startswith((part, "<"))),
    "is": lambda text, _, __: (text.isalpha(), text.islower(), text.isupper(), text.istitle(), text.isdigit()),
    "len": lambda text, _, __: (len(text), bool(text), hash(text)),
}
MADE: dict[str, Callable[[str, str, int], Any]] = {
    "strip": lambda text, _, __: [text.strip(), text.lstrip(), text.rstrip()],
    "strip of": lambda text, part, _: [text.strip(part), text.lstrip(part), text.rstrip(part)],
    "split": lambda text, part, number: text.split(part or None, number),
    "rsplit": lambda text, part, number: text.rsplit(part or None, number),
    "splitlines": lambda text, _, number: text.splitlines(bool(number % 2)),
    "partition": lambda text, part, _: [*text.partition(part or "<"), *text.rpartition(part or "<")],
    "replace": lambda text, part, number: [text.replace(part, "<x|"), text.replace(part, "", number)],
    "slice": lambda text, _, number: [text[number:], text[:number], text[::-1], text[1:-1]],
    "letters": lambda text, _, __: list(text),
    "add": lambda text, part, _: [text + part, part + text, text * 2, 2 * text],
    "case": lambda text, _, __: [text.upper(), text.lower(), text.title(), text.capitalize(), text.swapcase()],
    "fix": lambda text, part, _: [text.removeprefix(part), text.removesuffix(part)],
    "join": lambda text, part, _: [text.join([part, "x", text])],
    "joined": lambda text, part, _: [joined(["x", text, part, 5]), joined([part])],
}


def marked(text: str) -> Marked:
    return Marks([text]).put(text, HIDDEN)


@pytest.mark.parametrize("name", ASKED)
@given(text=TEXTS, part=PARTS, number=NUMBERS)
def test_answers_are_those_of_the_text(name: str, text: str, part: str, number: int) -> None:
    assert ASKED[name](marked(text), part, number) == ASKED[name](text, part, number)
    assert ASKED[name](marked(text), marked(part), number) == ASKED[name](text, part, number)


@pytest.mark.parametrize("name", MADE)
@given(text=TEXTS, part=PARTS, number=NUMBERS)
def test_what_is_made_of_it_says_the_same_and_keeps_its_marks(name: str, text: str, part: str, number: int) -> None:
    found, expected = (
        MADE[name](marked(text), part, number),
        MADE[name](text, part, number),
    )
    assert [true_text(one) for one in found] == expected
    for one in found:
        written, true = str.__str__(one), true_text(one)
        assert len(written) == len(true)
        assert "a" not in written.lower()  # it is in the text alone


@given(text=TEXTS)
def test_nothing_writes_the_text_without_its_marks(text: str) -> None:
    """Ways that a template has to make a string of one."""
    said = marked(f"<|a|>{text}")
    ways = [
        str(said),
        f"{said}",
        f"{said:>30}",
        "%s" % said,  # noqa: UP031
        "{}".format(said),  # noqa: UP032
        ",".join([said]),
        repr(said),
        said.center(40),
    ]
    ways += [json.dumps(said), json.dumps({said: said}, ensure_ascii=False), said.format(), said.encode().decode()]
    ways += [said.expandtabs(), said.zfill(40), said.ljust(40), "x".replace("x", said), said.translate({}), ascii(said)]
    ways += [str([said]), "".join(sorted(said)), max(said), next(iter(said)), said.casefold()]
    assert not any("|" in str.__str__(way) for way in ways)


def test_marks_are_characters_that_occur_nowhere_else() -> None:
    marks = Marks(["x\U000f0000", "\U000f0002"])
    said = marks.put("<|>\U000f0000", "<|>")
    assert len(set(str.__str__(said))) == 4
    assert str.__str__(said)[3] == "\U000f0000"
    assert "\U000f0002" not in str.__str__(said)
    assert marks.meaning(str.__str__(said)) == "<|>\U000f0000"
