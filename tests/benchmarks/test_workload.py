"""The bench's workload: the same for both engines, and as mixed as it says."""

from __future__ import annotations

import pytest

from benchmarks.workload import Load, make_jobs

ADAPTERS = [f"a{index}" for index in range(16)]


def test_the_same_seed_gives_the_same_prompts_for_every_popularity() -> None:
    base, uniform = (make_jobs(Load(), popularity, ADAPTERS, 1000) for popularity in ("base", "uniform"))
    assert [job.prompt for job in base] == [job.prompt for job in uniform]
    assert make_jobs(Load(), "uniform", ADAPTERS, 1000) == uniform
    assert make_jobs(Load(seed=1), "uniform", ADAPTERS, 1000) != uniform


def test_prompts_keep_the_length_limits_and_the_vocabulary() -> None:
    jobs = make_jobs(Load(num_requests=200), "base", ADAPTERS, 50)
    lengths = [len(job.prompt) for job in jobs]
    assert min(lengths) >= 16
    assert 200 < max(lengths) <= 256
    assert all(3 <= token < 50 for job in jobs for token in job.prompt)


def test_uniform_fills_each_batch_with_every_adapter_once() -> None:
    jobs = make_jobs(Load(), "uniform", ADAPTERS, 1000)
    for start in range(0, 64, 16):
        assert {job.adapter for job in jobs[start : start + 16]} == set(ADAPTERS)


def test_base_and_identical_name_none_and_one() -> None:
    assert {job.adapter for job in make_jobs(Load(), "base", ADAPTERS, 1000)} == {None}
    assert {job.adapter for job in make_jobs(Load(), "identical", ADAPTERS, 1000)} == {"a0"}


def test_an_unknown_popularity_is_refused() -> None:
    with pytest.raises(ValueError, match="zipf"):
        make_jobs(Load(), "zipf", ADAPTERS, 1000)
