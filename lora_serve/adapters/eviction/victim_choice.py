"""Chooses the entries that leave a tier for a newcomer, under the tenants' floors."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


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
    NOBODY = enum.auto()


# (reluctance, who is spared), in turn until there is room: a floor gives way only if nothing else makes room
STAGES = (
    (0, Spared.BELOW_FLOOR),
    (0, Spared.AT_FLOOR),
    (1, Spared.BELOW_FLOOR),
    (1, Spared.AT_FLOOR),
    (0, Spared.NOBODY),
    (1, Spared.NOBODY),
    (2, Spared.NOBODY),
)


class VictimChoice:
    """The entries chosen so far, and what would be left."""

    def __init__(
        self,
        held: Mapping[str, Amount],
        max_bytes: int | None,
        max_items: int | None,
        tenant_floor: float,
        newcomer: tuple[str, int] | None,
        guaranteed: Mapping[str, int] | None = None,
    ) -> None:
        """`held`: per tenant. `newcomer`: its tenant and bytes; None: the tier itself shrinks. `guaranteed`: bytes, by
        tenant, that other tenants' newcomers never take.
        """
        self._guaranteed = (guaranteed or {}) if newcomer else {}
        self._left = dict(held)
        self._max_bytes = max_bytes
        self._max_items = max_items
        self._tenant = newcomer[0] if newcomer else None
        tenants = set(held) | ({newcomer[0]} if newcomer else set())
        self._part = tenant_floor / max(len(tenants), 1)
        total = Amount(newcomer[1], 1) if newcomer else Amount()
        for amount in held.values():
            total = total.plus(amount.num_bytes, amount.num_items)
        self._total = total
        self._chosen: list[Resident] = []
        self._leaving_anyway: list[Resident] = []

    @property
    def fits(self) -> bool:
        """True if there is room without the chosen entries."""
        return not self._lacks_bytes and (self._max_items is None or self._total.num_items <= self._max_items)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the chosen entries, in order."""
        return tuple(resident.key for resident in (*self._leaving_anyway, *self._chosen))

    def leave(self, residents: Iterable[Resident]) -> None:
        """Choose these entries whatever room there is."""
        for resident in residents:
            self._move(resident, -1)
            self._leaving_anyway.append(resident)

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
        if spared is Spared.NOBODY:
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
