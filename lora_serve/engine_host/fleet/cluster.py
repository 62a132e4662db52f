"""The Ray cluster of a fleet: one of this server's own, on this machine alone, or one that is joined. No Serve here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lora_serve.core.config import FleetConfig


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster to which this process is connected: `ray` may be used."""

    address: str  # HOST:PORT of its GCS
    is_own: bool  # started by this process, and ended with it


@contextmanager
def open_cluster(config: FleetConfig) -> Iterator[Cluster]:
    """Starts or joins a cluster, and connects this process to it as long as the block lasts. Takes seconds: call it
    on a thread. Raises ConfigError in words where Ray is not installed, or no cluster can be reached.
    """
    raise NotImplementedError
