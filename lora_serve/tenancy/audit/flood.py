"""Which acts need not be noted any more: a tenant's refused ones beyond so many within a minute.

A refused act costs its sender nothing and the server a flushed line, here and in Redis. Whoever may do nothing at all
must not be able to fill the disk with what it tries, or to push the others' lines out of Redis.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from lora_serve.core.tenant import Role
from lora_serve.tenancy.audit.journal import Act

MAX_REFUSED = 60  # of a tenant within a minute
_TOO_MANY = 429  # nobody looked at what it was about
_CLIENT_LEFT = 499  # the act may have been done


class RefusedActs:
    """Counts by tenant, for the minute that it is."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._minute = 0
        self._counts: Counter[tuple[str, bool]] = Counter()

    def is_one_too_many(self, act: Act) -> bool:
        """Whether it is refused and enough of its tenant's were noted. What did something never is, and of an admin's
        only what came too often.
        """
        is_exempt = act.role == Role.ADMIN and act.outcome != _TOO_MANY
        if is_exempt or not _was_refused(act):
            return False
        if (minute := int(self._clock() // 60)) != self._minute:
            self._minute, self._counts = minute, Counter()
        sender = (act.tenant, act.role == Role.ADMIN)
        self._counts[sender] += 1
        return self._counts[sender] > MAX_REFUSED


def _was_refused(act: Act) -> bool:
    return act.role == Role.INFERENCE or 400 <= act.outcome < _CLIENT_LEFT
