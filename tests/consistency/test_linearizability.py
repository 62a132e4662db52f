"""The judge of histories: sound ones pass, and each kind of anomaly that is planted is found."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.consistency.linearizability import NEVER, Model, Operation, check
from tests.consistency.models import adapter, alias, tenant

BOUND = 2.0
LOOKS = ("show", "serve", "knock")
SHOWN = (((1, 7), (2, 8)), 2)  # versions 1 and 2, of which 2 answers


def did(times: tuple[float, float], act: tuple[Any, ...], answer: Any, replica: int = 0) -> Operation:
    """One that may be `BOUND` old if it changed nothing."""
    invoked, returned = times
    changes = act[0] not in LOOKS and answer < 400
    return Operation(replica, act, invoked, returned, answer, changes, invoked if changes else invoked - BOUND)


def lost(invoked: float, act: tuple[Any, ...], last: float = NEVER) -> Operation:
    """Nobody knows whether it was done; if so, then until `last`."""
    return Operation(0, act, invoked, last, None, True, invoked, is_known=False)


TWO_VERSIONS = [did((0, 1), ("register", 7, True), 201), did((2, 3), ("register", 8, True), 201)]
KEY = [did((0, 1), ("create",), 201), did((2, 3), ("make", "k"), 201)]
REVOKED = [*KEY, did((4, 5), ("revoke", "k"), 200)]
SOUND: dict[str, tuple[Model, list[Operation]]] = {
    "read_of_ones_own": (adapter, [*TWO_VERSIONS, did((4, 5), ("show",), SHOWN)]),
    "stale_within_the_bound": (adapter, [*TWO_VERSIONS, did((4.9, 5.5), ("serve",), 7, replica=1)]),
    "concurrent_in_either_order": (
        adapter,
        [
            did((0, 9), ("register", 7, True), 201),
            did((0, 9), ("register", 8, True), 201, replica=1),
            did((10, 11), ("show",), (((1, 8), (2, 7)), 2)),
        ],
    ),
    "unknown_that_was_done_late": (
        adapter,
        [*TWO_VERSIONS, lost(4, ("roll_back",)), did((9, 10), ("serve",), 8), did((20, 21), ("serve",), 7)],
    ),
    "unknown_that_was_not_done": (adapter, [*TWO_VERSIONS, lost(4, ("delete", None)), did((9, 10), ("serve",), 8)]),
    "stale_refusal": (adapter, [TWO_VERSIONS[0], did((2.5, 2.9), ("roll_back",), 404, replica=1)]),
    "deleted_and_made_anew": (
        adapter,
        [
            *TWO_VERSIONS,
            did((4, 5), ("delete", None), 200),
            did((6, 7), ("serve",), None),
            did((8, 9), ("register", 8, False), 201),
            did((10, 11), ("show",), (((1, 8),), 1)),
        ],
    ),
    "alias": (alias, [did((0, 1), ("set", 7), 200), did((2, 3), ("remove",), 200), did((4, 5), ("serve",), None)]),
    "revoked_key_just_now": (tenant, [*REVOKED, did((5.5, 6.5), ("knock", "k"), True, replica=1)]),
    "revoked_key": (tenant, [*REVOKED, did((5.5, 6.5), ("knock", "k"), False)]),
}
ANOMALIES: dict[str, tuple[Model, list[Operation]]] = {
    "lost_write": (adapter, [*TWO_VERSIONS, did((9, 10), ("show",), (((1, 7),), 1))]),
    "lost_write_between_others": (
        adapter,
        [
            *TWO_VERSIONS,
            did((4, 5), ("roll_back",), 200),
            did((6, 7), ("register", 9, False), 201),
            did((9, 10), ("show",), (((1, 7), (2, 8), (3, 9)), 2)),
        ],
    ),
    "one_number_twice": (adapter, [*TWO_VERSIONS, did((9, 10), ("show",), (((1, 7), (1, 8)), 1))]),
    "done_twice": (
        adapter,
        [
            *TWO_VERSIONS,
            did((4, 5), ("register", 9, True), 201),
            did((6, 7), ("roll_back",), 200),
            did((9, 10), ("serve",), 7),
        ],
    ),
    "stale_beyond_the_bound": (adapter, [*TWO_VERSIONS, did((5.1, 5.5), ("serve",), 7, replica=1)]),
    "stale_after_ones_own": (adapter, [*TWO_VERSIONS, did((3.1, 3.5), ("serve",), 7)]),
    "back_in_time": (
        adapter,
        [
            *TWO_VERSIONS,
            did((3.1, 3.2), ("serve",), 8, replica=1),
            did((3.3, 3.4), ("serve",), 7, replica=1),
        ],
    ),
    "deleted_is_served": (adapter, [*TWO_VERSIONS, did((4, 5), ("delete", None), 200), did((8, 9), ("serve",), 8)]),
    "refused_without_a_reason": (adapter, [*TWO_VERSIONS, did((6, 7), ("roll_back",), 409)]),
    "said_of_an_older_state": (  # a route that was set back elsewhere, "set" where this was not known
        adapter,
        [
            *TWO_VERSIONS,
            did((4, 5), ("set_route", 1, None), 200, replica=1),
            did((5.1, 5.2), ("set_route", 2, None), 200),
            did((9, 10), ("serve",), 7),
        ],
    ),
    "unknown_that_was_done_too_late": (
        adapter,
        [*TWO_VERSIONS, lost(4, ("roll_back",), 9), did((12, 13), ("serve",), 8), did((20, 21), ("serve",), 7)],
    ),
    "alias_lost": (alias, [did((0, 1), ("set", 7), 200), did((2, 3), ("set", 8), 200), did((9, 10), ("serve",), 7)]),
    "resurrected_key": (
        tenant,
        [*REVOKED, did((6, 7), ("knock", "k"), False), did((8, 9), ("knock", "k"), True, replica=1)],
    ),
    "key_of_a_deleted_tenant": (
        tenant,
        [
            *KEY,
            did((4, 5), ("delete",), 200),
            did((6, 7), ("create",), 201),
            did((9, 10), ("knock", "k"), True),
        ],
    ),
    "lost_key": (tenant, [*KEY, did((8, 9), ("knock", "k"), False)]),
    "tenant_made_twice": (tenant, [*KEY, did((4, 5), ("create",), 201)]),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_history_is_explained(name: str) -> None:
    model, operations = SOUND[name]
    assert check(operations, model, None).is_right


@pytest.mark.parametrize("name", ANOMALIES)
def test_planted_anomaly_is_found(name: str) -> None:
    model, operations = ANOMALIES[name]
    assert check(operations, model, None).stuck


def made_up(seed: int, num_acts: int) -> list[Operation]:
    """A history of four clients on one id that was right: each act takes effect at a moment between its two times."""
    draw, state = random.Random(seed), None
    free, operations = [0.0] * 4, []
    for number in range(num_acts):
        moment = float(number)
        act = draw.choice(
            [
                ("register", draw.randrange(4), True),
                ("set_route", draw.randrange(1, 4), None),
                ("roll_back",),
                ("delete", None) if draw.random() < 0.3 else ("show",),
                ("serve",),
            ]
        )
        after, answer = adapter(state, act)
        client = min(range(4), key=free.__getitem__)
        changes = act[0] not in LOOKS and answer < 400
        invoked = draw.uniform(max(free[client], moment - 3), moment)
        returned = free[client] = draw.uniform(moment, moment + 3)
        is_lost = draw.random() < 0.1
        if is_lost and draw.random() < 0.5:
            after = state  # and it was not done either
        elif not changes and is_lost:
            continue
        known = (returned + 5, None) if is_lost else (returned, answer)
        operations.append(Operation(client, act, invoked, *known, changes or is_lost, invoked, not is_lost))
        state = after
    return operations


@pytest.mark.parametrize("seed", range(6))
def test_history_with_an_order_is_explained_and_one_changed_answer_is_not(seed: int) -> None:
    """Long histories in which acts overlap; a content that nobody registered is in no order."""
    operations = made_up(seed, 60)
    apart = [replace(one, replica=i) for i, one in enumerate(operations)]
    assert check(apart, adapter, None).is_right
    place = next(i for i, one in enumerate(apart) if one.act == ("serve",) and one.is_known)
    wrong = replace(apart[place], answer=99)
    assert check([*apart[:place], wrong, *apart[place + 1 :]], adapter, None).stuck
