"""The host tier: values in RAM by digest. No torch."""

from __future__ import annotations

from typing import Generic, TypeVar

from lora_serve.adapters.eviction import create_policy
from lora_serve.adapters.eviction.residents import Reluctance, Residents, no_reluctance
from lora_serve.core.errors import AdapterUnavailableError

V = TypeVar("V")


class HostCache(Generic[V]):
    """A cache with a budget in bytes and in items. Owned by one thread (the engine loop), so it has no lock."""

    def __init__(
        self, max_bytes: int, max_items: int | None = None, policy: str = "lru", tenant_floor: float = 0.0
    ) -> None:
        """`max_items` None: no limit. `policy`: a file in adapters/eviction. `tenant_floor`: see Residents."""
        self._max_bytes = max_bytes
        self._residents = Residents(create_policy(policy), max_bytes, max_items, tenant_floor)
        self._values: dict[str, V] = {}

    @property
    def max_bytes(self) -> int:
        return self._max_bytes

    @property
    def max_items(self) -> int | None:
        return self._residents.max_items

    @property
    def num_bytes(self) -> int:
        return self._residents.num_bytes

    def get(self, digest: str) -> V | None:
        """The value, or None. Counts as a use."""
        if digest in self._values:
            self._residents.use(digest)
        return self._values.get(digest)

    def put(
        self,
        digest: str,
        value: V,
        num_bytes: int,
        tenant: str = "",
        load_seconds: float = 0.0,
        reluctance: Reluctance = no_reluctance,
    ) -> tuple[str, ...]:
        """Store `value`; return the digests evicted for it, in order.

        `load_seconds`: the cost of loading it again; 0: not known. `reluctance` must never be None. Raises
        AdapterUnavailableError, and changes nothing, if the value alone is over the budget.
        """
        if num_bytes > self.max_bytes:
            raise AdapterUnavailableError(
                f"The adapter needs {num_bytes} bytes of host memory and --adapter-host-memory allows {self.max_bytes}."
            )
        self.drop(digest)
        evicted = self._residents.victims(tenant, num_bytes, reluctance)
        assert evicted is not None, "nothing in host memory is held there"
        self._evict(evicted)
        self._residents.add(digest, tenant, num_bytes, load_seconds)
        self._values[digest] = value
        return evicted

    def drop(self, digest: str) -> bool:
        """Remove the value; returns False if there was none."""
        if digest not in self._values:
            return False
        self._residents.remove(digest)
        del self._values[digest]
        return True

    def resize(self, max_bytes: int, max_items: int | None, reluctance: Reluctance = no_reluctance) -> tuple[str, ...]:
        """Set a new budget; return the digests evicted for it."""
        self._max_bytes = self._residents.max_bytes = max_bytes
        self._residents.max_items = max_items
        evicted = self._residents.surplus(reluctance)
        self._evict(evicted)
        return evicted

    def bytes_of(self, digest: str) -> int:
        """The bytes of one value, 0 if there is none; not a use."""
        return self._residents.bytes_of(digest)

    def has_room(self, tenant: str, num_bytes: int, wanted: frozenset[str], coming: int, num_coming: int) -> bool:
        """True if `tenant`'s value fits beside the `wanted` ones here, `num_coming` others (`coming` bytes) under way,
        and what other tenants' floors protect.
        """
        kept = self._residents.protected(tenant, wanted)
        total = kept.num_bytes + coming + sum(map(self.bytes_of, wanted)) + num_bytes
        count = kept.num_items + num_coming + len(wanted) + 1
        return total <= self.max_bytes and (self.max_items is None or count <= self.max_items)

    @property
    def digests(self) -> tuple[str, ...]:
        """All digests, oldest first."""
        return tuple(self._values)

    def __contains__(self, digest: object) -> bool:
        """True if the value is here; not a use."""
        return digest in self._values

    def __len__(self) -> int:
        return len(self._values)

    def _evict(self, digests: tuple[str, ...]) -> None:
        for digest in digests:
            self._residents.remove(digest, for_room=True)
            del self._values[digest]
