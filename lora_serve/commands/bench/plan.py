"""The plan of a load: requests and their times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request. `prompt`: token ids, or text; chat takes text only.

    `at`: seconds from the start; None: as soon as a user is free.
    """

    prompt: tuple[int, ...] | str
    adapter: str | None  # None: the base model
    output_tokens: int
    at: float | None = None
    num_prompt: int = 0  # tokens a text was meant to have; ids are counted

    @property
    def prompt_tokens(self) -> int:
        return self.num_prompt if isinstance(self.prompt, str) else len(self.prompt)


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of a load. Closed loop: `concurrency` users, each sending its next request when the last one is
    answered.

    Open loop, for requests that have a time (all or none): each is sent at its time, whether or not earlier ones are
    answered; `concurrency` then caps how many are under way, None does not, and whoever waits for a place is late by
    the server's fault, not by the plan's: latencies count from the planned time.
    """

    requests: Iterable[PlannedRequest]  # iterated once per run; may be endless if `duration` is given
    concurrency: int | None = None
    duration: float | None = None  # seconds after which no more requests are sent; those under way are awaited
    cut_off: float | None = None  # seconds after which whoever is not answered has failed
    warmup: tuple[PlannedRequest, ...] = ()  # sent before, as a closed loop, in no figure
