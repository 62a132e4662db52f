"""What is read from traces, and what is drawn for them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from lora_serve.core.errors import ConfigError
from lora_serve.simulate.workload import TraceRow, WorkloadConfig, make_arrivals, read_trace

TRACES = Path(__file__).resolve().parents[2] / "benchmarks" / "traces"


def draw(rows: list[TraceRow], **fields: object) -> list:
    defaults = {"num_requests": 400, "num_adapters": 50, "num_tenants": 5}
    return make_arrivals(rows, WorkloadConfig(**{**defaults, **fields}), 100, 8, 4096)


def test_azure_times_count_from_the_first_request() -> None:
    rows = read_trace(TRACES / "azure_code_2023_cut.csv")
    assert len(rows) == 1500
    assert rows[0] == TraceRow(0.0, 4808, 10)
    assert rows[1].time == pytest.approx(0.052)
    assert [row.time for row in rows] == sorted(row.time for row in rows)


def test_mooncake_rows_carry_the_ids_of_their_blocks() -> None:
    first = read_trace(TRACES / "mooncake_conversation_cut.jsonl")[0]
    assert (first.time, first.num_prompt, first.num_output) == (0.0, 6758, 500)
    assert first.blocks == tuple(range(14))


def test_a_trace_of_lengths_gets_arrivals_of_a_poisson_process() -> None:
    rows = read_trace(TRACES / "vidur_arxiv_summarization_cut.csv")
    assert rows[0] == TraceRow(None, 3772, 54)
    arrivals = draw(rows, num_requests=2000, rate=5.0)
    assert arrivals[-1].time == pytest.approx(400, rel=0.1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is none of"),
        ("a,b\n1,2\n", "is none of"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnever,1,2\n", "a row is not"),
        ('{"timestamp": 0}\n', "a row is not"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,0,3\n", "holds no request"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"--trace .*trace: {message}"):
        read_trace(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none")


def test_popularity_is_zipf_over_adapters_of_all_tenants() -> None:
    arrivals = draw(read_trace(TRACES / "azure_conv_2023_cut.csv"), num_requests=6000, zipf=1.0)
    counts = [count for _, count in Counter(arrival.adapter.digest for arrival in arrivals).most_common()]
    assert counts[0] / counts[1] == pytest.approx(2.0, rel=0.25)
    assert counts[0] / counts[9] == pytest.approx(10.0, rel=0.3)
    assert {arrival.adapter.tenant for arrival in arrivals} == {f"t000{index}" for index in range(5)}


def test_a_trace_that_is_too_short_is_run_through_again_at_the_same_rate() -> None:
    rows = [TraceRow(float(second), 10, 2) for second in range(10)]
    assert [arrival.time for arrival in draw(rows, num_requests=25)] == [float(second) for second in range(25)]
    assert draw(rows, num_requests=25, rate=4.0)[-1].time == pytest.approx(6.0)


def test_conversations_of_mooncake_keep_their_adapter() -> None:
    rows = [TraceRow(float(index), 1024, 5, (0, 1 + index % 7)) for index in range(70)]
    arrivals = draw(rows, num_requests=70)
    for index in range(7):
        assert len({arrival.adapter for arrival in arrivals[index::7]}) == 1


def test_equal_blocks_are_equal_tokens_and_other_prompts_share_only_their_prefix() -> None:
    rows = [TraceRow(0.0, 1100, 5, (0, 1, 2)), TraceRow(1.0, 1100, 5, (0, 1, 3))]
    first, second = (arrival.request().prompt_token_ids for arrival in draw(rows, num_requests=2))
    assert len(first) == 1100
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:]
    one, other = (
        arrival.request().prompt_token_ids
        for arrival in draw([TraceRow(0.0, 40, 5), TraceRow(1.0, 40, 5)], num_requests=2, shared_prefix=16)
    )
    assert one[:16] == other[:16]
    assert one[16] != other[16]


def test_a_flood_comes_from_one_tenant_and_urgent_requests_have_a_lower_priority_number() -> None:
    arrivals = draw([TraceRow(0.0, 10, 2)], num_requests=2000, flood=0.5, urgent=0.1)
    flood = [arrival for arrival in arrivals if arrival.group == "flood"]
    assert len(flood) == pytest.approx(1000, rel=0.1)
    assert len({arrival.adapter.tenant for arrival in flood}) == 1
    urgent = [arrival.request().priority for arrival in arrivals if arrival.group == "urgent"]
    assert set(urgent) == {-1}
    assert len(urgent) == pytest.approx(100, rel=0.3)


def test_lengths_are_cut_to_what_the_model_takes() -> None:
    (arrival,) = draw([TraceRow(0.0, 9000, 5000)], num_requests=1)
    assert arrival.num_prompt + arrival.num_output == 4096
    assert arrival.num_prompt >= 1
