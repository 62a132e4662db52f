"""Stop strings over a stream."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from lora_serve.text.output import StopMatcher

LETTERS = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=2)


def stream(pieces: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """What was shown after each piece, and the stop string that ended it."""
    matcher, shown = StopMatcher(stops, include), []
    for piece in pieces:
        text, matched = matcher.push(piece)
        shown.append(text)
        if matched is not None:
            return shown, matched
    shown.append(matcher.flush())
    return shown, None


def plain_cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The oracle: try every end, shortest text first."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(LETTERS, STOPS, st.lists(st.integers(0, 30), max_size=5))
@example("aaab", ["aab"], [2])  # a beginning that fails is itself the beginning of the next try
@example("abaabab", ["abab", "aabb"], [])
def test_cut_does_not_depend_on_where_the_pieces_end(text: str, stops: list[str], places: list[int]) -> None:
    cuts = sorted(min(place, len(text)) for place in places)
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown, matched = stream(pieces, stops)
    assert ("".join(shown), matched) == plain_cut(text, stops)


@given(LETTERS, STOPS)
def test_shown_text_never_holds_a_stop_string_nor_a_text_that_is_later_withdrawn(text: str, stops: list[str]) -> None:
    final, _ = plain_cut(text, stops)
    so_far = ""
    for piece in stream(list(text), stops)[0]:
        so_far += piece
        assert final.startswith(so_far)
        assert not any(stop in so_far for stop in stops)


def test_possible_beginning_of_a_stop_string_is_held_back_until_it_is_decided() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("abc E")[0] == "abc "
    assert matcher.push("N")[0] == ""
    assert matcher.push("x")[0] == "ENx"


def test_held_back_text_comes_out_when_the_text_ends() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("abc EN")[0] == "abc "
    assert matcher.flush() == "EN"


def test_no_stop_strings_means_no_delay() -> None:
    assert StopMatcher([]).push("abc") == ("abc", None)


def test_stop_string_is_shown_where_the_caller_asked_for_it() -> None:
    assert stream(["ab", "cEN", "Dx"], ["END"], include=True) == (["ab", "c", "END"], "END")
