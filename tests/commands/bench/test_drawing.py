"""What is drawn: lengths, arrivals, popularity, whole workloads and traces; by statistics with fixed seeds."""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from lora_serve.commands.bench.workload import Arrivals, Lengths, Workload, draw_adapters, parse_lengths
from lora_serve.simulate.workload import TraceRow, read_trace

TRACES = Path(__file__).parents[3] / "benchmarks" / "traces"
NAMES = tuple(f"a{index}" for index in range(16))


def drawn(text: str, count: int = 4000) -> list[int]:
    generator = random.Random(7)
    return [parse_lengths(text).draw(generator) for _ in range(count)]


def test_lengths_follow_the_distribution_that_was_named() -> None:
    assert set(drawn("128")) == {128}
    assert set(drawn("16-18")) == {16, 17, 18}
    assert statistics.mean(drawn("normal:200,50")) == pytest.approx(200, rel=0.02)
    assert statistics.stdev(drawn("normal:200,50")) == pytest.approx(50, rel=0.05)
    assert statistics.median(drawn("lognormal:200,0.8")) == pytest.approx(200, rel=0.05)
    assert statistics.mean(drawn("lognormal:200,0.8")) == pytest.approx(200 * 2.71828 ** (0.8**2 / 2), rel=0.06)
    assert min(drawn("normal:2,50")) == 1


@pytest.mark.parametrize("text", ["", "0", "x", "9-3", "0-4", "normal:5", "normal:0,1", "lognormal:-1,2", "1e3", "-5"])
def test_lengths_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="16-256"):
        parse_lengths(text)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 9.0])
def test_arrivals_have_the_rate_and_the_variation_that_were_asked_for(burstiness: float) -> None:
    arrivals = Arrivals(20.0, burstiness)
    times = list(itertools.islice(arrivals.times(random.Random(3)), 20_000))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_poisson_counts_have_a_variance_like_their_mean() -> None:
    times = list(itertools.takewhile(lambda at: at < 2000, Arrivals(5.0).times(random.Random(1))))
    counts = Counter(int(at) for at in times)
    per_second = [counts[second] for second in range(2000)]
    assert statistics.mean(per_second) == pytest.approx(5, rel=0.05)
    assert statistics.variance(per_second) == pytest.approx(5, rel=0.1)


def names_of(popularity: str, count: int = 1600, zipf: float = 1.1) -> list[str | None]:
    return list(itertools.islice(draw_adapters(popularity, NAMES, random.Random(5), zipf), count))


def test_popularities_share_the_adapters_as_they_say() -> None:
    assert set(names_of("base")) == {None}
    assert set(names_of("identical")) == {"a0"}
    uniform, distinct = names_of("uniform"), names_of("distinct")
    for start in range(0, 1600, 16):
        assert set(uniform[start : start + 16]) == set(NAMES)
        assert tuple(distinct[start : start + 16]) == NAMES
    assert len({tuple(uniform[start : start + 16]) for start in range(0, 1600, 16)}) > 90


@pytest.mark.parametrize("zipf", [0.6, 1.1])
def test_skewed_falls_with_the_rank_as_zipf_says(zipf: float) -> None:
    counts = Counter(names_of("skewed", 40_000, zipf))
    total = sum(rank**-zipf for rank in range(1, 17))
    for rank, name in enumerate(NAMES, 1):
        assert counts[name] / 40_000 == pytest.approx(rank**-zipf / total, rel=0.15)


def test_no_adapter_where_one_is_needed_is_refused() -> None:
    with pytest.raises(ValueError, match="needs adapters"):
        draw_adapters("uniform", (), random.Random(0))


WORKLOAD = Workload(40, 500, popularity="uniform", adapters=NAMES, arrivals=Arrivals(10.0))


def test_a_workload_is_the_same_each_time_and_another_one_for_another_seed() -> None:
    assert list(WORKLOAD) == list(WORKLOAD)
    assert [request.prompt for request in WORKLOAD] != [request.prompt for request in replace(WORKLOAD, seed=1)]
    assert len(list(WORKLOAD)) == 40


def test_popularities_send_the_same_prompts_at_the_same_times() -> None:
    other = replace(WORKLOAD, popularity="base")
    assert [(one.prompt, one.at) for one in WORKLOAD] == [(one.prompt, one.at) for one in other]


def test_prompts_keep_the_vocabulary_and_the_models_length() -> None:
    requests = list(replace(WORKLOAD, max_model_len=100))
    assert all(3 <= token < 500 for request in requests for token in request.prompt)
    assert all(len(request.prompt) + request.output_tokens <= 100 for request in requests)
    assert max(len(request.prompt) for request in WORKLOAD) > 200


def test_texts_are_made_of_the_words_that_were_given() -> None:
    (request,) = replace(WORKLOAD, num_requests=1, words=("ab", "cd"))
    assert isinstance(request.prompt, str)
    assert set(request.prompt.split(" ")) == {"ab", "cd"}
    assert len(request.prompt.split(" ")) == request.prompt_tokens > 1


def test_the_warm_up_names_every_adapter_and_repeats_no_prompt() -> None:
    warmup = WORKLOAD.warmup(20)
    assert [request.adapter for request in warmup] == [*NAMES, *NAMES[:4]]
    assert all(request.at is None for request in warmup)
    assert not {request.prompt for request in warmup} & {request.prompt for request in WORKLOAD}
    assert {request.adapter for request in replace(WORKLOAD, popularity="base").warmup(3)} == {None}


def test_a_trace_gives_lengths_and_times_and_speed_compresses_the_times() -> None:
    rows = tuple(read_trace(TRACES / "azure_conv_2023_cut.csv"))
    requests = list(Workload(3100, 500, trace=rows, speed=4.0))
    assert len(rows) == 1500
    assert [request.output_tokens for request in requests[:1500]] == [row.num_output for row in rows]
    assert requests[700].at == pytest.approx((rows[700].time or 0) / 4)
    times = [request.at or 0.0 for request in requests]
    assert times == sorted(times)
    assert requests[1500].prompt_tokens == requests[0].prompt_tokens
    assert requests[1500].prompt != requests[0].prompt


def test_equal_blocks_of_a_trace_are_equal_tokens_and_conversations_keep_their_adapter() -> None:
    rows = (TraceRow(0.0, 1030, 5, (1, 2, 9)), TraceRow(1.0, 1100, 5, (1, 2, 7)), TraceRow(2.0, 600, 5, (1, 4)))
    first, second, third = Workload(3, 500, trace=rows, popularity="distinct", adapters=NAMES)
    assert first.prompt[:1024] == second.prompt[:1024]
    assert first.prompt[:512] == third.prompt[:512]
    assert first.prompt[1024:] != second.prompt[1024:1030]
    assert first.adapter == second.adapter != third.adapter
    assert [len(one.prompt) for one in (first, second, third)] == [1030, 1100, 600]


def test_a_trace_of_lengths_alone_has_no_times_unless_a_rate_is_given() -> None:
    rows = tuple(read_trace(TRACES / "vidur_arxiv_summarization_cut.csv"))
    assert {request.at for request in Workload(5, 500, trace=rows)} == {None}
    timed = list(Workload(5, 500, trace=rows, arrivals=Arrivals(2.0)))
    assert all(request.at is not None for request in timed)
    assert [request.prompt_tokens for request in timed] == [row.num_prompt for row in rows[:5]]


def test_lengths_are_frozen_values() -> None:
    assert parse_lengths("16-256") == Lengths("uniform", 16, 256)
