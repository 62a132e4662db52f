"""A limit on wrong keys per address and minute.

A key of this server's own making has 256 random bits and cannot be guessed: the limit protects the server from the
load, and the log from floods. Therefore a right key is served whatever else its address sends, and nobody is
locked out by a neighbour behind the same proxy. Each server counts alone.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from lora_serve.core.errors import WrongKeysError
from lora_serve.tenancy.quotas.rate_window import WINDOW, WindowCount

MAX_ADDRESSES = 4096  # that are remembered, those that sent the last ones
_IPV6_SITE = 64  # bits: what one customer of a network has at least
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Counts:
    minute: int
    previous: int = 0
    current: int = 0
    is_told: bool = False  # in the log

    def turn_to(self, minute: int) -> None:
        if minute == self.minute:
            return
        self.previous = self.current if minute == self.minute + 1 else 0
        self.minute, self.current, self.is_told = minute, 0, False


class WrongKeys:
    """Counts wrong keys by address. Used on the event loop's thread only."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`limit`: within a minute; 0: any number. `clock`: seconds."""
        self._limit = limit
        self._clock = clock
        self._counts: OrderedDict[str, _Counts] = OrderedDict()  # the last to send one last

    def note(self, address: str) -> None:
        """Counts a wrong key from the address. Raises WrongKeysError beyond the limit."""
        if self._limit == 0:
            return
        minute, seconds = divmod(self._clock(), WINDOW)
        counts = self._of(site_of(address), int(minute))
        elapsed = seconds / WINDOW
        if WindowCount(counts.previous, counts.current + 1, elapsed).is_within(self._limit):
            counts.current += 1
            return
        wait = WindowCount(counts.previous, counts.current, elapsed).seconds_until(self._limit, 1)
        if not counts.is_told:
            counts.is_told = True
            _log.warning("%d wrong keys within a minute from %s; more are refused with 429", self._limit, address)
        raise WrongKeysError(
            f"The API key is not valid, and {self._limit} that are not came from your address within a minute. "
            f"Try again in {wait:.1f} s, with another key.",
            wait,
        )

    def _of(self, site: str, minute: int) -> _Counts:
        counts = self._counts.setdefault(site, _Counts(minute))
        self._counts.move_to_end(site)
        if len(self._counts) > MAX_ADDRESSES:
            self._counts.popitem(last=False)
        counts.turn_to(minute)
        return counts


def site_of(address: str) -> str:
    """The part of an address that names one customer of a network: all of IPv4, the first half of IPv6."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((int(parsed), _IPV6_SITE), strict=False))
