from __future__ import annotations

import re
import subprocess

import pytest

from lora_serve.adapters.checkpoint import module_patterns
from lora_serve.adapters.checkpoint.module_patterns import Pattern, match_names
from lora_serve.core.errors import AdapterUnavailableError, InvalidAdapterError

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


class _ChildStartedError(Exception):
    """A child process was asked for."""


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise _ChildStartedError

    monkeypatch.setattr(subprocess, "run", refuse)


@pytest.mark.usefixtures("no_child")
def test_only_patterns_with_look_around_go_to_the_child_process() -> None:
    for text in (*PLAIN, RISKY[0], *RISKY[2:]):
        match_names([Pattern(text, whole=True)], NAMES)
    with pytest.raises(_ChildStartedError):
        match_names([Pattern(RISKY[1], whole=True)], NAMES)


EXPONENTIAL = [
    "(.*)*(.*)*(.*)*(.*)*(.*)*(.*)*$!",
    "(a|a)*(a|a)*(a|a)*b",
    r"(.|\w)(.|\w)(.|\w)(.|\w)" * 8 + "X",
    "(.*.*.*.*.*.*){20}X",
]


@pytest.mark.usefixtures("no_child")
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("text", EXPONENTIAL)
def test_patterns_on_which_backtracking_takes_years_are_matched_at_once(text: str, whole: bool) -> None:
    assert match_names([Pattern(text, whole)], NAMES * 10) == [frozenset()]


@pytest.mark.parametrize("whole", [True, False])
def test_exponential_pattern_with_look_around_is_refused_after_a_second_of_the_processor(
    monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    monkeypatch.setattr(module_patterns, "CHILD_SECONDS", 0.1)
    with pytest.raises(InvalidAdapterError, match="takes too long"):
        match_names([Pattern(r"(?!z)(.*\.?)*X", whole)], ["model.layers.0.self_attn.q_proj" * 3])


def test_machine_that_is_too_busy_for_a_pattern_is_not_the_adapters_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_patterns, "PATIENCE", 0.0)
    with pytest.raises(AdapterUnavailableError, match="try again"):
        match_names([Pattern("(?!z)a", whole=True)], NAMES)


@pytest.mark.parametrize("text", ["(((.{0,9}){0,9}){0,9}%dX)", ".*.*.*%dX"])
def test_many_patterns_are_bounded_together(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(module_patterns, "LINEAR_SECONDS", 0.02)
    with pytest.raises(InvalidAdapterError, match="takes too long"):
        match_names([Pattern(text % i, whole=False) for i in range(2000)], ["model.layers.0.q_proj" * 3] * 20)


@pytest.mark.usefixtures("no_child")
def test_names_of_all_modules_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_patterns, "LINEAR_SECONDS", 0.0)
    texts = [*NAMES, *(name.replace(".", r"\.") for name in NAMES)]
    assert match_names([Pattern(text, whole=False) for text in texts], NAMES) == [{name} for name in NAMES * 2]


@pytest.mark.parametrize("text", ["(", "(?P<a>x)(?P<a>y)", "*", "(?<=x+)y", "[z-a]"])
def test_text_that_is_no_regex_is_refused(text: str) -> None:
    with pytest.raises(InvalidAdapterError, match="not a regex"):
        match_names([Pattern(text, whole=True)], NAMES)


def test_very_long_pattern_is_refused() -> None:
    with pytest.raises(InvalidAdapterError, match="4097 characters"):
        match_names([Pattern("x" * 4097, whole=True)], NAMES)


LITERALS = [
    "q_proj",
    "q.proj",
    r"q\.proj",
    "0.self_attn.q_proj",
    r"layers\.1.self_attn",
    "model",
    ".q_proj",
    "_proj",
    "x",
]
OF_LITERALS = [*NAMES, "q_proj", "q.proj", "a.q.proj", "q-proj", "a.b.0_self_attn.q_proj", "model.layers.1.self_attn"]


def test_names_as_patterns_match_as_peft_get_pattern_key_says(no_child: None) -> None:
    from peft.utils.other import get_pattern_key

    expected = [{name for name in OF_LITERALS if get_pattern_key([text], name) == text} for text in LITERALS]
    assert match_names([Pattern(text, whole=False) for text in LITERALS], OF_LITERALS) == expected


def test_names_of_more_shapes_than_trainers_write_match_too() -> None:
    texts = [f"{'q' * length}_proj" for length in range(1, 100)]
    assert match_names([Pattern(text, whole=False) for text in texts], NAMES)[0] == {
        name for name in NAMES if name.endswith("q_proj")
    }
