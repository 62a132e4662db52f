"""The seam of a router, and the hash that all of them use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b


class Router:
    """The base of all routers: a file of this folder holds `class Router(base.Router)` with `choose`."""

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas

    def choose(self, digest: str, loads: Sequence[int], holds: Callable[[int, str], bool]) -> int:
        """The replica for a request of adapter `digest`.

        `loads`: requests under way per replica, as the router counts them; `holds(replica, digest)`: True if the
        replica has the adapter on its device or in host memory.
        """
        raise LookupError(f"{type(self).__module__} chooses nothing")


def score(digest: str, replica: int) -> int:
    """A hash that is the same for ever, and different for each pair."""
    return int.from_bytes(blake2b(f"{digest}/{replica}".encode(), digest_size=8).digest(), "big")
