"""RE2 beside Python's `re`: whatever is matched by RE2 has the same verdict by both."""

from __future__ import annotations

import re
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from lora_serve.adapters.checkpoint.module_patterns import compiled, is_linear
from tests.tiers import num_examples

EXAMPLES = num_examples() ** 2 // 5  # they are cheap
ATOMS = [
    *"abBx.01_^$-/",
    *(
        r"\.",
        r"\d",
        r"\D",
        r"\w",
        r"\W",
        r"\s",
        r"\S",
        r"\b",
        "[a-b]",
        "[^a]",
        r"[\d_]",
        "[^.]",
        r"[\w-]",
        "[a-]",
        "[.-0]",
    ),
    *("[Z-a]", r"[^\s]", "[ab]", "(?P<a>x)"),
]
REPEATS = ["*", "+", "?", "*?", "+?", "??", "{2}", "{1,2}", "{0,2}", "{1,}", "{0}", "{1,2}?"]
TRAINERS = [
    r".*\.q_proj",
    r".*(q_proj|v_proj)$",
    r"model\.layers\.\d+\.(self_attn|mlp)\..*_proj",
    r"(?:.*?(?:language|text|model).*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.mlp\.up_proj)",
    r"(?i).*Q_PROJ",
    r"^model\.layers\.(?:[0-9]|1[0-5])\..*",
    "all|.*",
]
MODULES = [f"model.layers.{i}.{m}" for i in (0, 9, 15, 16) for m in ("self_attn.q_proj", "mlp.up_proj", "norm")]


def _larger(inner: SearchStrategy[str]) -> SearchStrategy[str]:
    opening = st.sampled_from(["(", "(?:"])
    return st.one_of(
        st.lists(inner, min_size=1, max_size=4).map("".join),
        st.builds(lambda start, parts: f"{start}{'|'.join(parts)})", opening, st.lists(inner, max_size=3)),
        st.builds(str.__add__, inner, st.sampled_from(REPEATS)),
        st.builds(lambda start, part, repeat: f"{start}{part}){repeat}", opening, inner, st.sampled_from(REPEATS)),
    )


PATTERNS = st.recursive(st.sampled_from(ATOMS), _larger, max_leaves=12)
NAMES = st.lists(st.text(alphabet="abBx.01_-Z", min_size=1, max_size=8), min_size=1, max_size=6)


def assert_agreed(expression: str, names: list[str], whole: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Python says where it may come to read a pattern in another way
        ours, python = compiled(expression), re.compile(expression)
    for name in names:
        verdicts = [bool(one.fullmatch(name) if whole else one.match(name)) for one in (ours, python)]
        assert verdicts[0] == verdicts[1], (expression, name)


@given(PATTERNS, NAMES, st.sampled_from(["whole", "any case", "end"]))
@settings(max_examples=EXAMPLES)
def test_what_re2_matches_has_the_same_verdict_by_re(text: str, names: list[str], how: str) -> None:
    expression = {"whole": text, "any case": f"(?i){text}", "end": rf"(.*\.)?({text})$"}[how]
    if is_linear(expression, names):
        assert_agreed(expression, names, how != "end")


@given(st.text(alphabet=r"ab.01_-^$|()[]{},*+?\\:!=<>PidwsbBZzA\n", max_size=10), NAMES, st.booleans())
@settings(max_examples=EXAMPLES)
def test_random_text_that_re2_matches_has_the_same_verdict_by_re(text: str, names: list[str], whole: bool) -> None:
    expression = text if whole else rf"(.*\.)?({text})$"
    if is_linear(expression, names):
        assert_agreed(expression, names, whole)


@pytest.mark.parametrize("text", TRAINERS)
def test_patterns_of_trainers_are_linear(text: str) -> None:
    assert is_linear(text, MODULES)
    assert_agreed(text, MODULES, whole=True)


@pytest.mark.parametrize(
    "text",
    [
        *(
            r"a\Z",
            r"a\z",
            "a*+",
            "a{,2}",
            "a{",
            "[[:alpha:]]",
            r"()()\2",
            r"\12",
            r"\x41",
            r"\u0041",
            "(?a)a",
            "a(?i)b",
            "(?i:a)",
        ),
        *(
            "(?=a)b",
            "(?!a)b",
            "(?<=a)b",
            "(?<!a)b",
            "(?>a)b",
            "(?(1)a)",
            "(?#x)a",
            "(a",
            "*",
            "\u0130",
            "a\n",
            r"\B",
            r"\p{L}",
        ),
        *(r"\Qa\E", r"\C", "[]a]", "[^]a]", "[a&&b]", "(?P=a)", "a{1001}", "(?s).", "(?x) a"),
    ],
)
def test_what_the_two_might_read_in_different_ways_is_not_for_re2(text: str) -> None:
    assert not is_linear(text, ["a"])


@pytest.mark.parametrize("name", ["", "a\n", "a b", "\u0130", "\u0661"])
def test_names_that_the_two_might_read_in_different_ways_are_not_for_re2(name: str) -> None:
    assert not is_linear("a", ["a", name])
