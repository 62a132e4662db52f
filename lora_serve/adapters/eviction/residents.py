"""The table of the entries in one tier: their tenants and sizes, and which leave when room is needed.

Tenants' floors: with budget B and k tenants present (the newcomer's counts), a tenant's equal share is B / k, and
others cannot push it below `tenant_floor * B / k`. So one tenant's churn cannot flush the others. A tenant's own
entries may always go for its own newcomer. Where entries are so large that nothing else would make room, first the
entry that crosses its tenant's floor goes, then the policy's plain order decides: a newcomer that fits always gets in.

Tenants' budgets take precedence. Bytes that are guaranteed to a tenant never give way to other tenants' newcomers, and
a tenant at its maximum makes room for its newcomer among its own entries.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from lora_serve.adapters.eviction import EvictionPolicy
from lora_serve.core.tenant import TenantBudget


@dataclass(frozen=True, slots=True)
class Resident:
    """One entry of a tier."""

    key: str
    tenant: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Amount:
    """An amount of bytes and items in a tier."""

    num_bytes: int = 0
    num_items: int = 0

    def plus(self, num_bytes: int, num_items: int) -> Amount:
        return Amount(self.num_bytes + num_bytes, self.num_items + num_items)


class Spared(enum.Enum):
    """The entries that are spared as long as others can go."""

    BELOW_FLOOR = enum.auto()  # those whose tenant would fall below its floor
    AT_FLOOR = enum.auto()  # those whose tenant has no more than its floor already
    NONE = enum.auto()


# (reluctance, who is spared), in turn until there is room: a floor gives way only if nothing else makes room
STAGES = (
    (0, Spared.BELOW_FLOOR),
    (0, Spared.AT_FLOOR),
    (1, Spared.BELOW_FLOOR),
    (1, Spared.AT_FLOOR),
    (0, Spared.NONE),
    (1, Spared.NONE),
    (2, Spared.NONE),
)


class VictimChoice:
    """The entries chosen so far, and what would be left."""

    def __init__(self, tier: Residents, newcomer: tuple[str, int] | None, leaving: Sequence[Resident]) -> None:
        """`newcomer`: its tenant and bytes; None: the tier itself shrinks. `leaving`: entries that go in any case."""
        self._tenant: str | None
        self._tenant, num_bytes = newcomer or (None, 0)
        self._max_bytes, self._max_items = tier.max_bytes, tier.max_items
        self._guaranteed = tier.guaranteed if newcomer else {}
        self._part = tier.tenant_floor / max(len({*tier.held, self._tenant} - {None}), 1)
        self._left = dict(tier.held)
        self._total = Amount(tier.num_bytes + num_bytes, len(tier) + (newcomer is not None))
        self._chosen: list[Resident] = []
        self._leaving = leaving
        for resident in leaving:
            self._move(resident, -1)

    @property
    def fits(self) -> bool:
        """True if there is room without the chosen entries."""
        return not self._lacks_bytes and (self._max_items is None or self._total.num_items <= self._max_items)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the chosen entries, in order."""
        return tuple(resident.key for resident in (*self._leaving, *self._chosen))

    def choose(self, candidates: Iterable[tuple[int, Resident]]) -> None:
        """Choose as few of the (reluctance, entry) candidates, in order, as make room; all that may go if none do."""
        for reluctance, spared in STAGES:
            if self.fits:
                break
            candidates = self._pass(candidates, reluctance, spared)
        if self.fits:
            self._spare_needless()

    def _pass(
        self, candidates: Iterable[tuple[int, Resident]], reluctance: int, spared: Spared
    ) -> list[tuple[int, Resident]]:
        """Chooses in one stage; returns the candidates passed over. Reads lazily, as a tier may have thousands."""
        passed_over: list[tuple[int, Resident]] = []
        for candidate in candidates:
            if candidate[0] != reluctance or self._is_spared(candidate[1], spared):
                passed_over.append(candidate)
                continue
            self._move(candidate[1], -1)
            self._chosen.append(candidate[1])
            if self.fits:
                break
        return passed_over

    def _is_spared(self, resident: Resident, spared: Spared) -> bool:
        """Floors protect from other tenants only: a tenant's own entries may always go for its own newcomer."""
        if resident.tenant == self._tenant:
            return False
        left = self._left[resident.tenant]
        if left.num_bytes - resident.num_bytes < self._guaranteed.get(resident.tenant, 0):
            return True
        if spared is Spared.NONE:
            return False
        if self._lacks_bytes:  # floors are in the unit that is short
            floor, now, part = self._part * (self._max_bytes or 0), left.num_bytes, resident.num_bytes
        else:
            floor, now, part = self._part * (self._max_items or 0), left.num_items, 1
        return now <= floor if spared is Spared.AT_FLOOR else now - part < floor

    def _spare_needless(self) -> None:
        """Keeps small entries that were chosen before a large one made enough room."""
        for resident in self._chosen[-2::-1]:
            self._move(resident, 1)
            if self.fits:
                self._chosen.remove(resident)
            else:
                self._move(resident, -1)

    def _move(self, resident: Resident, sign: int) -> None:
        self._total = self._total.plus(sign * resident.num_bytes, sign)
        self._left[resident.tenant] = self._left[resident.tenant].plus(sign * resident.num_bytes, sign)

    @property
    def _lacks_bytes(self) -> bool:
        return self._max_bytes is not None and self._total.num_bytes > self._max_bytes


Reluctance = Callable[[str], int | None]  # 0: may go; 1: rather not; 2: only as the last resort; None: never


def no_reluctance(key: str) -> int | None:
    """Everything may go."""
    return 0


@dataclass(eq=False)
class Residents:
    """A budget in bytes, items or both. Without a lock: the owner of the tier owns this table."""

    _policy: EvictionPolicy
    max_bytes: int | None = None  # None: no limit, here and below
    max_items: int | None = None
    tenant_floor: float = 0.0  # part of a tenant's equal share, 0 to 1
    num_bytes: int = 0
    _residents: dict[str, Resident] = field(default_factory=dict)
    held: dict[str, Amount] = field(default_factory=dict)  # by tenant
    guaranteed: dict[str, int] = field(default_factory=dict)  # bytes by tenant: never taken for other newcomers
    _at_most: dict[str, int] = field(default_factory=dict)  # likewise

    def set_budgets(self, budgets: Iterable[TenantBudget]) -> None:
        """Set the budgets of all tenants that have one; `surplus` tells which entries must leave for it."""
        known = tuple(budgets)
        self.guaranteed = {budget.tenant: budget.guaranteed for budget in known if budget.guaranteed}
        self._at_most = {budget.tenant: budget.at_most for budget in known if budget.at_most is not None}

    def maximum(self, tenant: str) -> int | None:
        """The bytes that a tenant may have; None: no limit."""
        return self._at_most.get(tenant)

    def exceeds_maximum(self, tenant: str, num_bytes: int) -> bool:
        """True if `num_bytes` more would take the tenant beyond its maximum."""
        at_most = self._at_most.get(tenant)
        return at_most is not None and self.held.get(tenant, Amount()).num_bytes + num_bytes > at_most

    def guaranteed_to_others(self, tenants: Collection[str]) -> int:
        """The bytes that only newcomers of their own tenants can push out."""
        return sum(
            min(held.num_bytes, self.guaranteed.get(tenant, 0))
            for tenant, held in self.held.items()
            if tenant not in tenants
        )

    def add(self, key: str, tenant: str, num_bytes: int, load_seconds: float = 0.0) -> None:
        """Add an entry, for which `victims` has made room."""
        self._policy.add(key, num_bytes, load_seconds)
        self._residents[key] = Resident(key, tenant, num_bytes)
        self._count(tenant, num_bytes, 1)

    def use(self, key: str) -> None:
        self._policy.use(key)

    def grow(self, key: str, num_bytes: int) -> None:
        """Add bytes to an entry, for which `victims` has made room."""
        resident = self._residents[key]
        self._residents[key] = replace(resident, num_bytes=resident.num_bytes + num_bytes)
        self._count(resident.tenant, num_bytes, 0)

    def remove(self, key: str, *, for_room: bool = False) -> None:
        """Remove an entry. `for_room`: it was evicted."""
        resident = self._residents.pop(key)
        (self._policy.evict if for_room else self._policy.remove)(key)
        self._count(resident.tenant, -resident.num_bytes, -1)

    def victims(self, tenant: str, num_bytes: int, reluctance: Reluctance = no_reluctance) -> tuple[str, ...] | None:
        """The fewest entries, in order, whose eviction makes room for `tenant`'s newcomer; None: not possible."""
        own, is_enough = self._leaving_for_own(tenant, num_bytes, reluctance)
        if not is_enough:
            return None
        choice = self._choice((tenant, num_bytes), own, reluctance)
        return choice.keys if choice.fits else None

    def surplus(self, reluctance: Reluctance = no_reluctance) -> tuple[str, ...]:
        """The entries that must leave after the budget, or a tenant's maximum, shrank; at most all that may."""
        beyond = [one for tenant in self._at_most for one in self._leaving_for_own(tenant, 0, reluctance)[0]]
        return self._choice(None, beyond, reluctance).keys

    def protected(self, tenant: str, besides: Collection[str]) -> Amount:
        """The amount that the floors of other tenants protect, entries of `besides` not counted."""
        if not self.tenant_floor:
            return Amount()
        counted_elsewhere: dict[str, Amount] = {}
        for resident in filter(None, map(self._residents.get, besides)):
            amount = counted_elsewhere.get(resident.tenant, Amount())
            counted_elsewhere[resident.tenant] = amount.plus(resident.num_bytes, 1)
        part = self.tenant_floor / len({*self.held, tenant})
        floor_bytes, floor_items, total = int(part * (self.max_bytes or 0)), int(part * (self.max_items or 0)), Amount()
        for other in self.held.keys() - {tenant}:
            held, less = self.held[other], counted_elsewhere.get(other, Amount())
            num_bytes = min(held.num_bytes, floor_bytes) - less.num_bytes
            total = total.plus(max(num_bytes, 0), max(min(held.num_items, floor_items) - less.num_items, 0))
        return total

    def bytes_of(self, key: str) -> int:
        """The bytes of an entry, 0 if there is none."""
        resident = self._residents.get(key)
        return 0 if resident is None else resident.num_bytes

    def __contains__(self, key: object) -> bool:
        return key in self._residents

    def __iter__(self) -> Iterator[str]:
        """All keys, oldest first."""
        return iter(self._residents)

    def __len__(self) -> int:
        return len(self._residents)

    def _candidates(self, reluctance: Reluctance) -> Iterable[tuple[int, Resident]]:
        for key in self._policy.order():
            level = reluctance(key)
            if level is not None:
                yield level, self._residents[key]

    def _leaving_for_own(self, tenant: str, num_bytes: int, reluctance: Reluctance) -> tuple[list[Resident], bool]:
        """The tenant's own entries that must go so that it stays within its maximum, and whether they suffice."""
        if not self.exceeds_maximum(tenant, num_bytes):
            return [], True
        excess = self.held.get(tenant, Amount()).num_bytes + num_bytes - self._at_most[tenant]
        own = [candidate for candidate in self._candidates(reluctance) if candidate[1].tenant == tenant]
        leaving: list[Resident] = []
        for _, resident in sorted(own, key=lambda candidate: candidate[0]):
            if excess <= 0:
                break
            leaving.append(resident)
            excess -= resident.num_bytes
        return leaving, excess <= 0

    def _choice(
        self, newcomer: tuple[str, int] | None, leaving: Sequence[Resident], reluctance: Reluctance
    ) -> VictimChoice:
        choice = VictimChoice(self, newcomer, leaving)
        chosen = {resident.key for resident in leaving}
        choice.choose(one for one in self._candidates(reluctance) if one[1].key not in chosen)
        return choice

    def _count(self, tenant: str, num_bytes: int, num_items: int) -> None:
        self.num_bytes += num_bytes
        held = self.held.get(tenant, Amount()).plus(num_bytes, num_items)
        self.held[tenant] = held
        if held.num_items == 0:
            del self.held[tenant]
