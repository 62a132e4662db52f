"""The records of a load. Every time is in seconds since its start."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

CountedBy = Literal["continuous", "ids", "usage", "chunks"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens that arrived at one moment."""

    time: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The course of one request; after a failure `chunks` are those received until then.

    Counts and times of tokens are those of `sending.count_tokens`.
    """

    index: int
    adapter: str | None
    prompt_tokens: int  # as the server counted them, else as planned
    asked_tokens: int
    planned: float  # when it was to be sent: `sent` in a closed loop
    sent: float
    ended: float
    chunks: tuple[Chunk, ...] = ()
    counted_by: CountedBy = "chunks"
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None  # its kind: http_429, timeout, connection, hang_up, stream_error, bad_stream, cut_off
    detail: str = ""  # the error in words

    @property
    def output_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def first_token(self) -> float:
        """Seconds from the planned time. Raises IndexError without any token."""
        return self.chunks[0].time - self.planned

    @property
    def whole(self) -> float:
        """Seconds from the planned time to the end of the answer."""
        return self.ended - self.planned

    @property
    def chunk_gaps(self) -> tuple[float, ...]:
        """Seconds between arrivals."""
        return tuple(later.time - earlier.time for earlier, later in itertools.pairwise(self.chunks))

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds between tokens, one less than there are tokens; they sum up to the time from first to last.

        A chunk of m tokens shares the time since the chunk before evenly among them: m gaps of 1/m. Those that came
        together with the first token have gaps of 0. `chunk_gaps` are the pauses that a reader sees.
        """
        if not self.chunks:
            return ()
        shared = [0.0] * (self.chunks[0].num_tokens - 1)
        for gap, chunk in zip(self.chunk_gaps, self.chunks[1:], strict=True):
            shared += [gap / chunk.num_tokens] * chunk.num_tokens
        return tuple(shared)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """`records` in the order in which the requests were begun; the warm-up's are left out."""

    began: float  # Unix time
    seconds: float  # from the start to the end of the last answer
    records: tuple[RequestRecord, ...]

    @property
    def answered(self) -> tuple[RequestRecord, ...]:
        return tuple(record for record in self.records if record.error is None)

    @property
    def failed(self) -> tuple[RequestRecord, ...]:
        return tuple(record for record in self.records if record.error is not None)

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens per second of the requests that were answered completely."""
        return sum(record.output_tokens for record in self.answered) / self.seconds if self.seconds else 0.0


SHARES = (50, 90, 99)


def percentile(ordered: Sequence[float], share: float) -> float:
    """The percentile of ascending values, interpolated between the two nearest as numpy does; 0 of nothing. `share`: 0
    to 100.
    """
    if not ordered:
        return 0.0
    place = share / 100 * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread_ms(seconds: Iterable[float]) -> dict[str, float]:
    """p50, p90, p99, mean, max in ms."""
    ordered = sorted(seconds)
    found = {f"p{share}": percentile(ordered, share) for share in SHARES}
    found["mean"] = math.fsum(ordered) / len(ordered) if ordered else 0.0
    found["max"] = ordered[-1] if ordered else 0.0
    return {name: round(1000 * value, 3) for name, value in found.items()}


@dataclass(frozen=True, slots=True)
class Objective:
    """A service level in seconds; None: any. `itl` bounds a request's mean time between tokens."""

    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None

    def is_met(self, record: RequestRecord) -> bool:
        if record.error is not None:
            return False
        gaps = record.gaps
        mean_gap = math.fsum(gaps) / len(gaps) if gaps else 0.0
        found = (record.first_token, mean_gap, record.whole)
        limits = (self.ttft, self.itl, self.e2e)
        return all(limit is None or value <= limit for value, limit in zip(found, limits, strict=True))


def in_flight(records: Iterable[RequestRecord], seconds: float, points: int = 200) -> list[tuple[float, int]]:
    """(time, requests sent and not ended) at evenly spaced moments."""
    sent = sorted(record.sent for record in records)
    ended = sorted(record.ended for record in records)
    found, num_sent, num_ended = [], 0, 0
    for number in range(points + 1):
        now = seconds * number / points
        while num_sent < len(sent) and sent[num_sent] <= now:
            num_sent += 1
        while num_ended < len(ended) and ended[num_ended] <= now:
            num_ended += 1
        found.append((round(now, 4), num_sent - num_ended))
    return found


def tokens_over_time(records: Iterable[RequestRecord], seconds: float) -> list[tuple[float, float]]:
    """(middle of the bin, output tokens per second) in bins of a quarter of a second or more, 12 to 60 of them.

    Tokens of failed requests count too, as the server made them.
    """
    bins = min(60, max(12, int(4 * seconds)))
    width = seconds / bins if seconds > 0 else 1.0
    counts = [0] * bins
    for record in records:
        for chunk in record.chunks:
            counts[min(bins - 1, max(0, int(chunk.time / width)))] += chunk.num_tokens
    return [(round((index + 0.5) * width, 4), round(count / width, 2)) for index, count in enumerate(counts)]
