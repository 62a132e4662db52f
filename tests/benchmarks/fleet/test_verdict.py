"""The judge of a load with faults: each broken promise is seen, and nothing else is called one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.fleet.known_answers import KnownAnswers, check_distinct
from benchmarks.fleet.verdict import Event, Judged, verdict
from lora_serve.commands.bench.report import Chunk, RequestRecord
from lora_serve.commands.bench.workload import PlannedRequest

PROMPT = (5, 6)
KNOWN = KnownAnswers({("acme/a", PROMPT): "one two three", ("acme/b", PROMPT): "four five six"}, 3)
ASKED = PlannedRequest(PROMPT, "acme/a", 3)
RIGHT = RequestRecord(
    0, "acme/a", 2, 3, 1.0, 1.0, 2.0, tuple(Chunk(1 + n / 4, 1) for n in range(3)), text="one two three"
)
CUT = replace(
    RIGHT, chunks=RIGHT.chunks[:1], text="one ", error="stream_error", detail="The engine stopped; try again."
)
LOST = replace(RIGHT, chunks=(), text="", error="http_503", detail="The engine is being restarted.")
KILL = Event(1.5, "kill -9 of replica 7", may_cut=1)


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (RIGHT, "right"),
        (replace(RIGHT, text="four five six"), "wrong"),  # another adapter's
        (replace(RIGHT, text="one two", chunks=RIGHT.chunks[:2]), "wrong"),  # too short, and nobody said so
        (CUT, "cut"),
        (replace(CUT, text="four"), "wrong"),
        (replace(CUT, text="one two three one"), "wrong"),  # asked twice: tokens came again
        (LOST, "lost"),
    ],
)
def test_answers_are_judged_by_the_known_text(record: RequestRecord, kind: str) -> None:
    assert KNOWN.judge(record, ASKED) == kind


def found(*judged: Judged, events: tuple[Event, ...] = ()) -> list[str]:
    return verdict(judged, events, 10.0).failures


def test_sound_load_breaks_no_promise() -> None:
    assert found(Judged("right", RIGHT), Judged("cut", CUT), events=(KILL,)) == []


@pytest.mark.parametrize(
    ("judged", "events", "words"),
    [
        (Judged("wrong", RIGHT), (KILL,), "wrong answer"),
        (Judged("lost", LOST), (KILL,), "lost without a token"),
        (Judged("cut", CUT), (), "nothing was broken"),
        (Judged("cut", CUT), (replace(KILL, at=5.0),), "nothing was broken"),
        (Judged("cut", replace(CUT, detail="Internal error.")), (KILL,), "to try again"),
        (Judged("cut", replace(CUT, error="hang_up")), (KILL,), "to try again"),
        (Judged("cut", CUT), (replace(KILL, may_cut=0),), "and 0 ran there"),
    ],
)
def test_each_broken_promise_is_told(judged: Judged, events: tuple[Event, ...], words: str) -> None:
    failures = found(Judged("right", RIGHT), judged, events=events)
    assert len(failures) == 1
    assert words in failures[0]


def test_stream_that_survived_a_kill_is_cut_by_the_next() -> None:
    """On a slow machine it still waited for its first token when the first came."""
    long = replace(CUT, ended=12.0)
    assert found(Judged("cut", CUT), Judged("cut", long), events=(KILL, replace(KILL, at=11.5))) == []
    assert found(Judged("cut", long), Judged("cut", long), events=(KILL, replace(KILL, at=11.5))) != []


def test_killed_gateway_takes_its_own_connections_with_it_and_no_others() -> None:
    death = Event(1.5, "kill -9 of gateway 1", may_cut=0, gateway=1)
    gone = Judged("cut", replace(CUT, error="hang_up"), gateway=1)
    assert found(gone, events=(death,)) == []
    assert found(replace(gone, gateway=0), events=(death,)) != []
    assert found(Judged("wrong", CUT, gateway=1), events=(death,)) != []


def test_longest_silence_and_tokens_by_second_are_of_all_streams_together() -> None:
    late = replace(RIGHT, sent=8.0, ended=9.0, chunks=(Chunk(8.5, 3),))
    figures = verdict([Judged("right", RIGHT), Judged("right", late)], (), 10.0).figures
    assert figures["longest_silence_s"] == 7.0
    assert figures["tokens_by_second"][1] == 3
    assert figures["tokens_by_second"][8] == 3


def test_answers_that_do_not_tell_adapters_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="alike"):
        check_distinct({("acme/a", (number,)): "always this" for number in range(3)})
    check_distinct(KNOWN.texts)
