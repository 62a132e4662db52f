"""What an engine that is built anew is told again."""

from __future__ import annotations

from lora_serve.core.messages import Evict, Pin, Prefetch, Resize, Tune, Unpin
from lora_serve.engine.desired_state import DesiredState
from tests.engine.world import adapter


def test_limits_are_the_last_of_each() -> None:
    state = DesiredState(4)
    assert state.limits() == []
    for command in (Resize(max_loras=2), Tune(max_num_seqs=3), Resize(adapter_host_memory=10), Tune(max_num_seqs=4)):
        state.note(command)
    assert state.limits() == [Resize(max_loras=2, adapter_host_memory=10), Tune(max_num_seqs=4)]


def test_a_target_that_was_turned_off_stays_off() -> None:
    state = DesiredState(4)
    state.note(Tune(latency_target_ms=500.0))
    state.note(Tune(latency_target_ms=0))
    assert state.limits() == [Tune(latency_target_ms=0)]


def test_pins_come_first_then_the_latest_in_use_as_far_as_there_are_slots() -> None:
    state = DesiredState(3)
    state.note(Pin(adapter("p")))
    for name in ("a", "b", "c", "b", "p"):
        state.use((adapter(name),))
    assert state.residents() == [Pin(adapter("p")), Prefetch(adapter("b")), Prefetch(adapter("c"))]


def test_what_was_unpinned_or_evicted_is_not_brought_back() -> None:
    state = DesiredState(3)
    for name in ("a", "b"):
        state.note(Pin(adapter(name)))
        state.use((adapter(name),))
    state.note(Unpin("sha256:a"))
    state.note(Evict("sha256:a"))
    assert state.residents() == [Pin(adapter("b"))]


def test_it_remembers_no_more_than_there_are_slots() -> None:
    state = DesiredState(2)
    for number in range(100):
        state.use((adapter(str(number)),))
    assert state.residents() == [Prefetch(adapter("99")), Prefetch(adapter("98"))]
