"""What an engine that is built anew is told again."""

from __future__ import annotations

from lora_serve.core.messages import Evict, Pin, Prefetch, Resize, Tune, Unpin
from lora_serve.engine.desired_state import DesiredState
from tests.engine.world import adapter


def test_limits_are_the_last_of_each() -> None:
    orders = DesiredState(4)
    assert orders.limits() == []
    for command in (Resize(max_loras=2), Tune(max_num_seqs=3), Resize(host_bytes=10), Tune(max_num_seqs=4)):
        orders.note(command)
    assert orders.limits() == [Resize(max_loras=2, host_bytes=10), Tune(max_num_seqs=4)]


def test_a_target_that_was_turned_off_stays_off() -> None:
    orders = DesiredState(4)
    orders.note(Tune(ttft_target=0.5))
    orders.note(Tune(ttft_target=0))
    assert orders.limits() == [Tune(ttft_target=0)]


def test_pins_come_first_then_the_latest_in_use_as_far_as_there_are_slots() -> None:
    orders = DesiredState(3)
    orders.note(Pin(adapter("p")))
    for name in ("a", "b", "c", "b", "p"):
        orders.use((adapter(name),))
    assert orders.residents() == [Pin(adapter("p")), Prefetch(adapter("b")), Prefetch(adapter("c"))]


def test_what_was_unpinned_or_evicted_is_not_brought_back() -> None:
    orders = DesiredState(3)
    for name in ("a", "b"):
        orders.note(Pin(adapter(name)))
        orders.use((adapter(name),))
    orders.note(Unpin("sha256:a"))
    orders.note(Evict("sha256:a"))
    assert orders.residents() == [Pin(adapter("b"))]


def test_it_remembers_no_more_than_there_are_slots() -> None:
    orders = DesiredState(2)
    for number in range(100):
        orders.use((adapter(str(number)),))
    assert orders.residents() == [Prefetch(adapter("99")), Prefetch(adapter("98"))]
