"""A record of several replicas against what docs/how-to/replicas.md promises of their agreement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.consistency import models
from tests.consistency.linearizability import NEVER, Model, Operation, Verdict, check
from tests.consistency.recording import REFUSALS, Observed, is_look

MODELS: dict[str, Model] = {"adapter": models.adapter, "alias": models.alias, "tenant": models.tenant}
PROMISED = {"adapter": 2.0, "alias": 2.0, "tenant": 1.0}  # seconds within which replicas that reach Redis know
BOUNDS = (0.02, 0.1, 0.5, 1.0, 2.0)
LATE = 1.0  # seconds that an act takes from a mended network to Redis
HEALING = 5.0  # seconds after a cut within which a replica reaches Redis again


@dataclass
class Judgement:
    """`faults`: what no order explains, object by object. `lag`: the narrowest of BOUNDS that explains the others."""

    faults: list[str] = field(default_factory=list)
    lag: float = 0.0


@dataclass(frozen=True)
class Cut:
    """A time during which replicas did not reach Redis, or it was down."""

    replicas: frozenset[int]
    start: float
    end: float


def operations_of(observed: Sequence[Observed], cuts: Sequence[Cut], bound: float) -> list[Operation]:
    """Looks and refusals may be of an older state: of `bound` ago, and of before a cut while it lasts. What a broken
    network held back may reach Redis once it is mended.
    """
    found = []
    for one in observed:
        is_known = one.returned != NEVER
        changes = not is_known or (not is_look(one.act) and one.answer not in REFUSALS)
        since = one.invoked if changes else _oldest(one, cuts, bound)
        last = one.returned if is_known else _last(one, cuts)
        found.append(Operation(one.replica, one.act, one.invoked, last, one.answer, changes, since, is_known))
    return found


def _oldest(one: Observed, cuts: Sequence[Cut], bound: float) -> float:
    moment = one.invoked
    for cut in sorted(cuts, key=lambda cut: -cut.end):
        if one.replica in cut.replicas and cut.start <= moment <= cut.end + HEALING:
            moment = cut.start
    return moment - bound


def _last(one: Observed, cuts: Sequence[Cut]) -> float:
    """When an act can have been done at the latest."""
    held = [cut for cut in cuts if one.replica in cut.replicas and cut.start <= one.gave_up and one.invoked <= cut.end]
    return max([one.gave_up, *(cut.end for cut in held)]) + LATE


def judged(observed: Sequence[Observed], cuts: Sequence[Cut]) -> Judgement:
    """Looks for an order of each object's acts, by the narrowest bound first: it leaves the least to be tried."""
    by_object: dict[tuple[str, str], list[Observed]] = defaultdict(list)
    for one in observed:
        by_object[one.kind, one.name].append(one)
    judgement = Judgement()
    for (kind, name), some in sorted(by_object.items()):
        for bound in BOUNDS[: BOUNDS.index(PROMISED[kind]) + 1]:
            verdict = _verdict(MODELS[kind], operations_of(some, cuts, bound), is_last=bound == PROMISED[kind])
            if verdict is not None and verdict.is_right:
                judgement.lag = max(judgement.lag, bound)
                break
        else:
            judgement.faults.append(_words(kind, name, some, verdict))
    return judgement


def _verdict(model: Model, operations: Sequence[Operation], is_last: bool) -> Verdict | None:
    try:
        return check(operations, model, None)
    except TimeoutError:
        if is_last:
            raise
        return None


def _words(kind: str, name: str, some: Sequence[Observed], verdict: Verdict | None) -> str:
    assert verdict is not None
    start = some[0].invoked
    first = min(verdict.stuck, key=lambda one: one.returned)
    around = sorted((one for one in some if abs(one.invoked - first.invoked) < 6), key=lambda one: one.invoked)
    lines = [
        f"  {one.invoked - start:8.3f} {one.returned - start:8.3f} replica {one.replica} {one.act} -> {one.answer}"
        for one in around
    ]
    return "\n".join([f"{kind} {name}: no order explains {first}; the state was {verdict.state}", *lines])
