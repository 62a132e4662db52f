"""A report's figures are those of a real engine between two steps."""

from __future__ import annotations

from lora_serve.core.replica_report import ReplicaReport, report_of
from tests.engine.world import World, adapter


def look(world: World) -> ReplicaReport:
    return report_of("a", 1.0, world.engine.stats())


def test_prompts_wait_until_they_are_computed_and_rows_are_read_until_they_end() -> None:
    world = World(max_num_seqs=1)
    world.add("first", list(range(40)), max_tokens=2)
    world.add("second", list(range(10)), max_tokens=2)
    assert (look(world).num_waiting, look(world).waiting_tokens, look(world).running_tokens) == (2, 50, 0)
    world.step()  # 32 tokens a step
    assert (look(world).num_running, look(world).waiting_tokens, look(world).running_tokens) == (1, 18, 32)
    world.step()
    assert (look(world).waiting_tokens, look(world).running_tokens) == (10, 40)
    world.run()
    assert (look(world).num_running, look(world).waiting_tokens, look(world).running_tokens) == (0, 0, 0)


def test_adapters_are_told_by_where_they_are() -> None:
    world = World(auto_load=False, max_loras=1)
    world.add("1", [1, 2, 3], adapter("x"))
    world.step()
    assert (look(world).loading, look(world).host, look(world).device) == (("sha256:x",), (), ())
    world.finish_load(adapter("x"))
    world.step()
    assert (look(world).loading, look(world).host, look(world).device) == ((), ("sha256:x",), ("sha256:x",))
    assert (look(world).max_loras, look(world).num_blocks - look(world).num_free_blocks) == (1, 1)
