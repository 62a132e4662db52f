from __future__ import annotations

import re
import time

import pytest

from lora_serve.adapters.checkpoint import patterns
from lora_serve.adapters.checkpoint.patterns import Pattern, is_plain, match_names
from lora_serve.core.errors import InvalidAdapterError

NAMES = [f"model.layers.{i}.{m}" for i in range(12) for m in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")]
PLAIN = [
    r".*\.q_proj",
    r"model\.layers\.(0|1)\..*",
    "q_proj",
    r"layers.1\d*.self_attn.(?:q|o)_proj",
    r"(?:a|.*up_proj)",
]
RISKY = [  # as trainers write them
    r"(?:.*?(?:language|text|model).*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.mlp\.up_proj)",
    r"^(?!.*visual).*(?:q_proj|o_proj)$",
    r"(?i)MODEL.*Q_PROJ",
    r"(model\.)?(layers\.\d+\.)+.*(o_proj)",
]


@pytest.mark.parametrize("text", PLAIN + RISKY)
def test_whole_names_match_as_re_fullmatch_says(text: str) -> None:
    expected = {name for name in NAMES if re.fullmatch(text, name)}
    assert match_names([Pattern(text, whole=True)], NAMES) == [expected]


@pytest.mark.parametrize("text", [*PLAIN, *RISKY[:2], RISKY[3], "a)|(.*q_proj", ""])
def test_ends_of_names_match_as_peft_get_pattern_key_says(text: str) -> None:
    from peft.utils.other import get_pattern_key

    expected = {name for name in NAMES if get_pattern_key([text], name) == text}
    assert match_names([Pattern(text, whole=False)], NAMES) == [expected]


def test_several_patterns_keep_their_order() -> None:
    texts = [RISKY[1], PLAIN[0], RISKY[3], "nothing"]
    expected = [{name for name in NAMES if re.fullmatch(text, name)} for text in texts]
    assert match_names([Pattern(text, whole=True) for text in texts], NAMES) == expected


def test_trainers_patterns_go_to_the_child_process() -> None:
    assert [is_plain(text) for text in PLAIN] == [True] * len(PLAIN)
    assert [is_plain(text) for text in RISKY] == [False] * len(RISKY)


@pytest.mark.parametrize(
    "text",
    [
        "(a*)*b",
        "(a|a)+$",
        "(.*)*x",
        "a?" * 30 + "a" * 30,
        r"(a+)\1+b",
        r"(.|\w)" * 30 + "X",
        r"(?:.|\w)(?:.|\w)",
        ".*.*(a|b)",
    ],
)
def test_patterns_that_can_blow_up_are_not_matched_in_this_process(text: str) -> None:
    assert not is_plain(text)


@pytest.mark.parametrize("whole", [True, False])
def test_exponential_pattern_is_refused_in_bounded_time(monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    monkeypatch.setattr(patterns, "TIME_LIMIT", 0.5)
    start = time.monotonic()
    with pytest.raises(InvalidAdapterError, match="takes too long"):
        match_names([Pattern(r"(.*\.?)*X", whole)], ["model.layers.0.self_attn.q_proj" * 3])
    assert time.monotonic() - start < 5


def test_many_patterns_that_are_each_quick_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "TIME_LIMIT", 0.5)
    with pytest.raises(InvalidAdapterError, match="takes too long"):
        match_names([Pattern(f".*.*.*{i}X", whole=False) for i in range(2000)], ["model.layers.0.q_proj" * 3] * 20)


def test_many_literal_patterns_need_no_child_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "TIME_LIMIT", 0.0)
    assert match_names([Pattern(name, whole=False) for name in NAMES], NAMES) == [{name} for name in NAMES]


def test_worst_pattern_that_is_matched_here_is_quick() -> None:
    start = time.monotonic()
    match_names([Pattern(".*.*.*X", whole=True)], ["m" * 100] * 20)
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("text", ["(", "(?P<a>x)(?P<a>y)", "*", "(?<=x+)y", "[z-a]"])
def test_text_that_is_no_regex_is_refused(text: str) -> None:
    with pytest.raises(InvalidAdapterError, match="not a regex"):
        match_names([Pattern(text, whole=True)], NAMES)


def test_very_long_pattern_is_refused() -> None:
    with pytest.raises(InvalidAdapterError, match="4097 characters"):
        match_names([Pattern("x" * 4097, whole=True)], NAMES)
