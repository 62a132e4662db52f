"""The records of a load. Every time is in seconds since its start."""

from __future__ import annotations

import itertools
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

    Counts and times of tokens are those of `token_counts.count_tokens`.
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
