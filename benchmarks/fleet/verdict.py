"""What became of a load during which things were broken: counted, and held against what is promised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.fleet.known_answers import Kind
from lora_serve.commands.bench.report import RequestRecord, percentile, spread_ms

RETRY_WORDS = ("retry", "try again", "again")
SLACK = 0.3  # seconds by which the clocks of an event and of a record may differ


@dataclass(frozen=True, slots=True)
class Event:
    """Something that was broken, or mended. `at`: seconds since the load began, over at `until`."""

    at: float
    what: str
    until: float = 0.0
    may_cut: int | None = None  # streams that may end with an error by it; None: whatever was under way
    gateway: int | None = None  # of the one that was killed: its connections are lost with it

    def hit(self, record: RequestRecord) -> bool:
        """True if the request was under way at some time from the event to its end."""
        return record.sent <= max(self.at, self.until) + SLACK and record.ended >= self.at - SLACK


@dataclass(frozen=True, slots=True)
class Judged:
    """One request's course and what it is worth; `gateway`: the number of the one that was asked."""

    kind: Kind
    record: RequestRecord
    gateway: int = 0


@dataclass
class Verdict:
    """Figures of a load, and every broken promise in words."""

    counts: dict[str, int]
    figures: dict[str, Any]
    failures: list[str] = field(default_factory=list)


def verdict(judged: Sequence[Judged], events: Sequence[Event], seconds: float) -> Verdict:
    """Promised: no wrong answer; no request lost before its first token; a cut only by an event, with words that say
    to try again. Connections of a gateway that was killed are excepted.
    """
    deaths: dict[int | None, Event] = {event.gateway: event for event in events if event.gateway is not None}
    counted = [one for one in judged if not _died_with_gateway(one, deaths)]
    kinds = Counter(one.kind for one in counted)
    counts = {kind: kinds[kind] for kind in ("right", "wrong", "cut", "lost")}
    counts |= {"requests": len(judged), "gone_with_their_gateway": len(judged) - len(counted)}
    figures = {
        "seconds": round(seconds, 1),
        "first_token_ms": spread_ms(one.record.first_token for one in counted if one.kind == "right"),
        "longest_silence_s": round(_longest_silence([one.record for one in counted], seconds), 2),
        "events": [
            {**asdict(event), "under_way": _num_hit(counted, event), "cut": _num_cut(counted, event, events)}
            for event in events
        ],
        "tokens_by_second": _tokens_by_second([one.record for one in counted], seconds),
        "errors": _errors(counted),
    }
    return Verdict(counts, figures, _failures(counted, events))


def _died_with_gateway(one: Judged, deaths: dict[int | None, Event]) -> bool:
    death = deaths.get(one.gateway)
    return death is not None and one.kind in ("cut", "lost") and death.hit(one.record)


def _num_hit(judged: Sequence[Judged], event: Event) -> int:
    return sum(event.hit(one.record) for one in judged)


def _num_cut(judged: Sequence[Judged], event: Event, events: Sequence[Event]) -> int:
    """Streams that it cut: a request that waits for long may survive one event, and is cut by the last."""
    causes = [[other for other in events if other.hit(one.record)] for one in judged if one.kind == "cut"]
    return sum(max(hits, key=lambda hit: hit.at) is event for hits in causes if hits)


def _failures(judged: Sequence[Judged], events: Sequence[Event]) -> list[str]:
    found = [f"wrong answer: {_told(one)}" for one in judged if one.kind == "wrong"]
    found += [f"lost without a token: {_told(one)}" for one in judged if one.kind == "lost"]
    cut = [one for one in judged if one.kind == "cut"]
    found += [f"cut, and nothing was broken: {_told(one)}" for one in cut if not any(e.hit(one.record) for e in events)]
    found += [f"cut without a word that says to try again: {_told(one)}" for one in cut if not _says_retry(one.record)]
    for event in events:
        num_cut = _num_cut(judged, event, events)
        if event.may_cut is not None and num_cut > event.may_cut:
            found.append(f"{event.what} at {event.at:.1f} s cut {num_cut} streams, and {event.may_cut} ran there")
    return found


def _says_retry(record: RequestRecord) -> bool:
    return record.error == "stream_error" and any(word in record.detail for word in RETRY_WORDS)


def _told(one: Judged) -> str:
    record = one.record
    return (
        f"request {record.index} for {record.adapter} at gateway {one.gateway}, "
        f"{record.sent:.2f} to {record.ended:.2f} s, "
        f"{record.output_tokens} tokens, {record.error}: {record.detail[:200]}"
    )


def _errors(judged: Sequence[Judged]) -> dict[str, int]:
    """How often each, by its kind and first words."""
    found = Counter(f"{one.record.error}: {one.record.detail[:120]}" for one in judged if one.record.error is not None)
    return dict(found.most_common(12))


def _longest_silence(records: Sequence[RequestRecord], seconds: float) -> float:
    """The longest time in which nobody got a token."""
    times = sorted(chunk.time for record in records for chunk in record.chunks)
    return max(
        (later - earlier for earlier, later in zip([0.0, *times], [*times, seconds], strict=True)), default=seconds
    )


def _tokens_by_second(records: Sequence[RequestRecord], seconds: float) -> list[int]:
    """How many came in each second of the load."""
    found = [0] * (int(seconds) + 1)
    for record in records:
        for chunk in record.chunks:
            found[min(int(chunk.time), len(found) - 1)] += chunk.num_tokens
    return found


def first_token_p95(records: Sequence[RequestRecord]) -> float:
    """Seconds."""
    return percentile(sorted(record.first_token for record in records if record.chunks), 95)
