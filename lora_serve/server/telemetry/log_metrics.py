"""What the log leaves out, as metrics: an operator who misses a line finds here that there was one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector


class LogFigures(Protocol):
    """Counted since the start, in the server's own process; an engine's process counts in its own lines."""

    @property
    def num_dropped(self) -> int:
        """Records that found the log's queue full."""

    @property
    def num_held_back(self) -> int:
        """Records that were summed up with others like them."""


class LogMetrics(Collector):
    """Asked at each scrape."""

    def __init__(self, log: LogFigures) -> None:
        self._log = log

    def collect(self) -> Iterator[Metric]:
        dropped, held_back = self._log.num_dropped, self._log.num_held_back
        yield CounterMetricFamily(
            "lora_serve_log_records_dropped", "Log records for which there was no room.", value=dropped
        )
        yield CounterMetricFamily(
            "lora_serve_log_records_held_back", "Log records summed up as repeats of others.", value=held_back
        )
