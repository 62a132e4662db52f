"""The report that a replica of a fleet makes of itself each second, and that gateways choose replicas by."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lora_serve.core.stats import EngineStats


class ReplicaReport(msgspec.Struct, frozen=True, array_like=True):
    """One look at a replica. Digests are those of adapter versions; tokens are counted over all gateways' requests."""

    replica: str  # a random name that no replica before it had
    made_at: float  # seconds of the replica's `time.monotonic()`: orders its reports, says nothing beside another's
    device: tuple[str, ...] = ()  # adapters in slots
    host: tuple[str, ...] = ()  # in host memory, some of them in slots too
    loading: tuple[str, ...] = ()  # on their way there
    max_loras: int = 0  # slots
    num_running: int = 0  # requests
    num_waiting: int = 0
    waiting_tokens: int = 0  # of prompts, that are still to be computed
    running_tokens: int = 0  # of running rows, that are computed: what each step reads again
    num_blocks: int = 0  # of KV
    num_free_blocks: int = 0
    load_tokens: int = 0  # tokens that it computes in the time that the load of an adapter takes; 0: not known yet
    prefix_roots: tuple[int, ...] = ()  # of prompts that it has computed lately: `routing/fleet_view.py`
    is_host_full: bool = False  # one more adapter there, and another has to leave host memory


def report_of(replica: str, made_at: float, stats: EngineStats, prefix_roots: Sequence[int] = ()) -> ReplicaReport:
    """The report of a replica whose engine has these figures."""
    return ReplicaReport(
        replica=replica,
        made_at=made_at,
        device=tuple(slot.digest for slot in stats.slots),
        host=stats.host_digests,
        loading=stats.loading_digests,
        max_loras=stats.max_loras,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        waiting_tokens=stats.num_waiting_tokens,
        running_tokens=stats.num_running_tokens,
        num_blocks=stats.num_blocks,
        num_free_blocks=stats.num_free_blocks,
        load_tokens=_load_tokens(stats),
        prefix_roots=tuple(prefix_roots),
        is_host_full=_is_host_full(stats),
    )


def _load_tokens(stats: EngineStats) -> int:
    """Seconds of a load into host memory, the mean since the start, over those of a prompt's token."""
    host = stats.tiers.get("host")
    if host is None or not host.loads or stats.batcher is None or not stats.batcher.cost.get("token"):
        return 0
    return round(host.load_seconds / host.loads / stats.batcher.cost["token"])


def _is_host_full(stats: EngineStats) -> bool:
    """True if an adapter as large as the mean of those there would not fit in."""
    host = stats.tiers.get("host")
    if host is None or not host.num_bytes or not host.num_items or not host.budget_bytes:
        return False
    return host.num_bytes + host.num_bytes / host.num_items > host.budget_bytes
