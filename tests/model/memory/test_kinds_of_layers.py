"""Bytes of the KV cache shared out between layers that see all tokens and layers that have a window."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.batch import ActivationModel
from lora_serve.core.config import EngineConfig
from lora_serve.core.errors import ConfigError
from lora_serve.core.model_spec import LinearShape, ModelSpec
from lora_serve.core.settings import Settings
from lora_serve.model.memory_setup import BlockNeeds, DeviceFacts, MemoryShares, share_out

GEMMA_27B = 10, 52  # layers of both kinds
GPT_OSS = 12, 12


def spec_of(max_model_len: int, *windows: int | None) -> ModelSpec:
    linears = {"q": LinearShape(10, 10)}
    return ModelSpec("m", "M", 100, max_model_len, (0,), 2, linears, 0, "float32", "cpu", windows=windows)


def config_of(**settings: Any) -> EngineConfig:
    return Settings(model="m", block_size=16, **settings).part(EngineConfig)


def shares(
    spec: ModelSpec, costs: tuple[int, ...], num_bytes: int, *, keys: float = 0, limit: int = 10**12, **settings: Any
) -> MemoryShares:
    facts = DeviceFacts(False, limit, 10**12, costs)
    config = config_of(kv_cache_memory=num_bytes, **settings)
    return share_out(facts, spec, config, ActivationModel(per_decode_key=keys), 2, 0)


@pytest.mark.parametrize(("costs", "window", "part"), [(GEMMA_27B, 1024, 0.27), (GPT_OSS, 128, 0.51)])
def test_long_rows_take_the_bytes_that_they_hold(costs: tuple[int, int], window: int, part: float) -> None:
    """Of rows of 8 192 tokens in what held eight of them, and of their bytes once the pool is large."""
    few, many = 8 * 512 * sum(costs), 1000 * 512 * sum(costs)
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 2048}
    spec = spec_of(8192, None, window)
    (num_blocks, num_windowed) = shares(spec, costs, few, **settings).num_blocks
    ever = 16 * (window // 16 + 3) + 128
    assert num_windowed >= ever
    assert num_blocks == min(16 * 512, (few - ever * costs[1]) // costs[0]) > 15 * 512
    row = 512 * costs[0] + (window // 16 + 3) * costs[1]
    assert row / (512 * sum(costs)) == pytest.approx(part, abs=0.02)
    assert shares(spec, costs, many, **settings).num_blocks == (16 * 512,) * 2, "no more than all rows can fill"


@given(st.data())
def test_no_work_has_less_room_than_in_pools_of_one_size_and_one_row_always_runs(data: st.DataObject) -> None:
    length, rows = data.draw(st.integers(32, 4000), "length"), data.draw(st.integers(1, 40), "rows")
    windows = data.draw(
        st.sampled_from([(None,), (data.draw(st.integers(1, 4100)),), (None, length // 3 + 1)]), "windows"
    )
    costs = tuple(data.draw(st.integers(1, 60)) for _ in windows)
    config = config_of(max_num_seqs=rows, max_num_batched_tokens=data.draw(st.integers(max(rows, 16), 3000)))
    need = BlockNeeds.of(spec_of(length, *windows), config)
    least = sum(map(int.__mul__, need.least, costs))
    num_bytes = data.draw(st.integers(least, 40 * least), "bytes")
    found = need.shared(num_bytes, costs)
    assert sum(map(int.__mul__, found, costs)) <= num_bytes
    assert all(map(int.__ge__, found, need.least))
    alike = min(num_bytes // sum(costs), need.most)
    if alike >= max(need.least):
        assert found[0] >= alike
        assert found[-1] >= min(alike, need.ever)
    if windows == (None,):
        assert found == (min(need.most, num_bytes // costs[0]),)


def test_less_than_one_row_needs_is_refused_and_windows_alone_need_less_than_a_whole_row() -> None:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    with pytest.raises(ConfigError, match=r"give at least 5120 bytes"):
        shares(spec_of(8192, None), (10,), 5119, **settings)
    least = 128 // 16 + 3 + 4
    assert shares(spec_of(8192, 128), (10,), 10 * least, **settings).num_blocks == (least,)
    with pytest.raises(ConfigError, match=f"give at least {10 * least} bytes"):
        shares(spec_of(8192, 128), (10,), 10 * least - 1, **settings)
    assert shares(spec_of(8192, None, 128), (10, 3), 5120 + 3 * least, **settings).num_blocks == (512, least)


def test_host_memory_is_shared_as_the_devices() -> None:
    found = shares(spec_of(8192, None, 128), (10, 30), 80_000, swap_space=8_000, max_num_seqs=4)
    assert [round(10 * host / own) for host, own in zip(found.num_host_blocks, found.num_blocks, strict=True)] == [1, 1]
    assert found.num_host_blocks[0] * 10 + found.num_host_blocks[1] * 30 <= 8_000


def test_keys_of_a_whole_table_are_counted_though_its_first_blocks_are_none_of_the_rows() -> None:
    settings: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "keys": 1}
    least = 10 * (128 // 16 + 3 + 4) + 8192
    assert shares(spec_of(8192, 128), (10,), 10**6, limit=least, **settings).num_blocks[0] >= 15
    with pytest.raises(ConfigError, match=f"--max-model-len 8192 needs {least}"):
        shares(spec_of(8192, 128), (10,), 10**6, limit=least - 1, **settings)
