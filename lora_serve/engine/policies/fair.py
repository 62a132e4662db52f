"""The virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024) over accounts.

Each account's counter rises by the service of a step, divided by the account's weight: 1 per prompt token computed for
the first time, 2 per output token. The account with the lowest counter is tried next. An account that begins to wait is
lifted to the lowest counter among those that wait, so that idling saves up no service. Any two accounts that wait all
the time then get equal service for their weights, but for 2 max(L, 2 M): L the longest prompt, M the tokens of a batch.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

from lora_serve.engine.policies import base
from lora_serve.engine.policies.base import AgedQueue
from lora_serve.engine.sequence import Sequence

_PROMPT_WEIGHT, _OUTPUT_WEIGHT = 1, 2
_HEADS = 8  # of an account's queue that are looked at for one that waits for a slot
_MAX_IDLE = 1024  # accounts that are remembered though they do not wait


@dataclass(slots=True, eq=False)
class _Account:
    name: str
    weight: float
    queue: AgedQueue
    counter: float = 0.0
    last_begun: float = -math.inf  # when one of its prompts was last computed

    def __lt__(self, other: _Account) -> bool:
        return self.name < other.name


@dataclass(frozen=True, slots=True)
class _SlotShares:
    """The accounts' shares of the device slots."""

    held: Counter[str]  # in use, by account
    slots_per_weight: float  # among the accounts that use slots or wait for one
    someone_is_below: bool  # and waits for one


class Policy(base.Policy):
    """Within an account the order of `base.Policy`. Work conserving: others use a share that its owner leaves.

    An account with a waiting request, of which no prompt was computed for `max_wait` seconds, comes first with one
    sequence, however large its counter. More would let a flood, all of which has waited for long, be served first.
    """

    def __init__(self, view: base.PolicyView) -> None:
        super().__init__(view)
        self._weights = dict(view.weights)
        self._accounts: dict[str, _Account] = {}
        self._waiting: dict[str, _Account] = {}
        self._last_counter = 0.0  # of the account that was the last to wait
        self._now = 0.0  # of the last order
        self._needy: frozenset[str] | None = None  # accounts that wait for a slot; None: not looked up in this step
        self._shares: _SlotShares | None = None  # None: not counted since a sequence came or went

    def add(self, sequence: Sequence) -> None:
        self._shares = None
        account = self._account(sequence.account)
        if not len(account.queue):
            account.counter = max(account.counter, self._floor())
            self._waiting[account.name] = account
        account.queue.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._shares = None
        account = self._accounts[sequence.account]
        account.queue.remove(sequence)
        if not len(account.queue):
            del self._waiting[account.name]
            self._last_counter = account.counter
            self._forget()

    def served(self, sequence: Sequence, num_prompt: int, num_output: int) -> None:
        account = self._account(sequence.account)
        account.counter += (_PROMPT_WEIGHT * num_prompt + _OUTPUT_WEIGHT * num_output) / account.weight
        if num_prompt:
            account.last_begun = self._now

    def order(self, now: float) -> Iterator[Sequence]:
        """The order by the present counters; each sequence yielded counts with its prompt for the turns that follow."""
        self._now, self._needy, self._shares = now, None, None
        turns = [(account.counter, account, account.queue.order(now)) for account in self._waiting.values()]
        return self._take_turns(turns, self._overdue(now))

    def _take_turns(
        self, turns: list[tuple[float, _Account, Iterator[Sequence]]], overdue: list[str]
    ) -> Iterator[Sequence]:
        queues = {account.name: (counter, account, queue) for counter, account, queue in turns}
        for name in overdue:
            counter, account, queue = queues[name]
            sequence = next(queue)
            queues[name] = (counter + _cost(sequence) / account.weight, account, queue)
            yield sequence
        heap = list(queues.values())
        heapq.heapify(heap)
        while heap:
            counter, account, queue = heap[0]
            following = next(queue, None)
            if following is None:
                heapq.heappop(heap)
                continue
            heapq.heapreplace(heap, (counter + _cost(following) / account.weight, account, queue))
            yield following

    def _overdue(self, now: float) -> list[str]:
        since = [(max(account.last_begun, account.queue.waits_since), name) for name, account in self._waiting.items()]
        return [name for begun, name in sorted(since) if now - begun >= self.view.max_wait]

    def may_take_slot(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """False if the account has its share of the slots in use and one that has less waits for a slot."""
        if self._shares is None:
            self._shares = self._count_shares(running)
        own, shares = sequence.account, self._shares
        is_below = shares.held[own] < shares.slots_per_weight * self._weight(own)
        return is_below or not shares.someone_is_below

    def _count_shares(self, running: list[Sequence]) -> _SlotShares:
        held = Counter(name for name, _ in {(s.account, slot.digest) for s in running for slot in s.slots})
        if self._needy is None:
            accounts = self._waiting.values()
            self._needy = frozenset(account.name for account in accounts if self._waits_for_slot(account))
        needy = self._needy & self._waiting.keys()
        per_weight = self.view.num_slots() / sum(map(self._weight, needy | held.keys())) if needy else 0.0
        return _SlotShares(held, per_weight, any(held[name] < per_weight * self._weight(name) for name in needy))

    def _waits_for_slot(self, account: _Account) -> bool:
        heads = islice(account.queue.order(self._now), _HEADS)
        refs = chain.from_iterable(sequence.refs for sequence in heads)
        return any(self.view.is_on_host(ref) and not self.view.is_on_device(ref) for ref in refs)

    def victim(self, running: list[Sequence], newcomer: Sequence | None) -> Sequence | None:
        """Takes rows back from a flood that came first.

        The account with the most rows for its weight gives way to one that got no more service so far, as long as it
        keeps no fewer rows for its weight than the other has then. Each such change makes rows more equal, so none is
        taken back. Little work is lost: no sequence gives way twice, and the newcomer first waits as long as
        recomputing the victim's tokens takes.
        """
        if newcomer is None:
            return super().victim(running, newcomer)
        rows = Counter(sequence.account for sequence in running)
        own = self._account(newcomer.account)
        after = (rows[own.name] + 1) / own.weight
        above = [
            name
            for name in rows
            if (rows[name] - 1) / self._weight(name) >= after and self._account(name).counter >= own.counter
        ]
        most = max(above, key=lambda name: rows[name] / self._weight(name), default=None)
        waited, per_token = self._now - newcomer.waiting_since, self.view.cost.seconds_per_token
        return next(
            (
                row
                for row in reversed(running)
                if row.account == most and row.num_preemptions == 0 and per_token * row.num_computed <= waited
            ),
            None,
        )

    def _account(self, name: str) -> _Account:
        if name not in self._accounts:
            self._accounts[name] = _Account(name, self._weight(name), AgedQueue(self.view.max_wait, self.key))
        return self._accounts[name]

    def _weight(self, name: str) -> float:
        return self._weights.get(name, 1.0)

    def _floor(self) -> float:
        """The counter that a newly waiting account is lifted to."""
        return min((account.counter for account in self._waiting.values()), default=self._last_counter)

    def _forget(self) -> None:
        """Drops idle accounts that would be lifted anyway, once they are many."""
        if len(self._accounts) > 2 * len(self._waiting) + _MAX_IDLE:
            floor = self._floor()
            self._accounts = {
                name: account
                for name, account in self._accounts.items()
                if name in self._waiting or account.counter > floor
            }


def _cost(sequence: Sequence) -> float:
    return _PROMPT_WEIGHT * max(0, sequence.num_prompt - sequence.num_served)
