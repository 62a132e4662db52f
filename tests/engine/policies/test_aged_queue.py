"""Nobody is overtaken for longer than the queue's max_wait."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lora_serve.engine.policies.base import AgedQueue
from lora_serve.engine.sequence import Sequence
from tests.engine.policies.traffic import waiting


def by_priority(sequence: Sequence) -> tuple[float, ...]:
    return (sequence.request.priority, sequence.sequence_id)


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 30)), max_size=20), st.integers(0, 50), st.data())
def test_order_is_the_aged_by_waiting_time_then_the_rest_by_key(
    arrivals: list[tuple[int, int]], now: int, data: st.DataObject
) -> None:
    queue, left = AgedQueue(10, by_priority), []
    for number, (priority, arrival) in enumerate(arrivals):
        sequence = waiting(number, priority=priority, arrival_time=float(arrival))
        queue.add(sequence)
        left.append(sequence)
    for sequence in data.draw(st.lists(st.sampled_from(left), unique=True)) if left else []:
        queue.remove(sequence)
        left.remove(sequence)
    aged = [s for s in left if now - s.waiting_since >= 10]
    rest = [s for s in left if now - s.waiting_since < 10]
    expected = [*sorted(aged, key=lambda s: (s.waiting_since, s.sequence_id)), *sorted(rest, key=by_priority)]
    assert list(queue.order(now)) == expected
    assert len(queue) == len(left)
    assert queue.waits_since == min((s.waiting_since for s in left), default=float("inf"))


def test_order_is_a_picture_of_the_moment() -> None:
    queue = AgedQueue(10, by_priority)
    sequences = [waiting(number) for number in range(4)]
    for now in (0.0, 5.0, 100.0):
        for sequence in sequences:
            queue.add(sequence)
        for sequence in queue.order(now):
            queue.remove(sequence)
        assert len(queue) == 0
