"""The seam of a router, and the hash that routers share."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import blake2b

from lora_serve.routing.fleet_view import ReplicaView, RoutedRequest


class Router(ABC):
    """The base of all routers: a file of this folder holds `class Router(base.Router)` with `choose`.

    The choice depends on the arguments, on the seed and on the choices before, and on nothing else.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)

    @abstractmethod
    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView]) -> list[str]:
        """All of the replicas, the best first: those that follow are tried if the first does not answer."""


def score(key: str, replica: str) -> int:
    """A hash that is the same for ever, and different for each pair: the replica with the highest is the key's home.

    Rendezvous hashing (Thaler and Ravishankar, 1998): of a replica that joins or leaves only its own keys move.
    """
    return int.from_bytes(blake2b(f"{key}/{replica}".encode(), digest_size=8).digest(), "big")


def home_key(request: RoutedRequest) -> str:
    """The key by which a request has a home: its adapters; else its prompt's beginning; else its own id."""
    return "+".join(request.digests) or str(request.roots[0] if request.roots else request.request_id)
