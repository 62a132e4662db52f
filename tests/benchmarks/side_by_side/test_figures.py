"""Figures out of canned samples, against numbers worked out by hand."""

from __future__ import annotations

from benchmarks.side_by_side.figures import Run, medians, ratios, same_first_token
from benchmarks.workload import Measured, Sample
from tests.benchmarks.side_by_side.canned import measured, run


def test_throughput_counts_output_tokens_over_wall_time() -> None:
    figures = Run.of("lora_serve", "lora_serve", "base", 1, measured(1, 2))
    assert figures.output_tokens_per_s == 3.0
    assert figures.ttft_ms["p50"] == 500.0
    assert figures.itl_ms["p99"] == 300.0


def test_failed_requests_are_counted_and_bring_no_tokens() -> None:
    figures = Run.of("vllm-float32", "vllm", "base", 1, Measured(1.0, (), num_failed=3))
    assert (figures.requests, figures.failed, figures.output_tokens_per_s) == (3, 3, 0.0)
    assert "3 FAILED" in figures.line()


def test_rounds_are_reduced_to_their_median_with_the_least_and_the_most() -> None:
    (found,) = medians([run("vllm-float32", "base", speed, failed=1) for speed in (1.0, 9.0, 2.0)])
    assert (found.output_tokens_per_s, found.least, found.most) == (2.0, 1.0, 9.0)
    assert (found.rounds, found.failed) == (3, 3)


def test_ratios_compare_with_our_base_and_with_each_peer_and_the_best() -> None:
    runs = [
        run("lora_serve", "base", 100),
        run("lora_serve", "uniform", 80),
        run("peft-float32", "uniform", 10),
        run("llama_cpp-f16", "uniform", 20),
        run("llama_cpp-f16", "base", 1000),
    ]
    assert ratios(medians(runs)) == {
        "base": {"times llama_cpp-f16": 0.1, "best peer": "llama_cpp-f16", "times the best peer": 0.1},
        "uniform": {
            "share of base-only kept": 0.8,
            "times peft-float32": 8.0,
            "times llama_cpp-f16": 4.0,
            "best peer": "llama_cpp-f16",
            "times the best peer": 4.0,
        },
    }


def test_a_peer_that_answered_nothing_is_no_best_peer() -> None:
    found = ratios(medians([run("lora_serve", "base", 100), run("vllm-float32", "base", 0, failed=4)]))
    assert found == {"base": {}}


def test_agreement_is_the_share_of_equal_first_tokens() -> None:
    assert same_first_token(measured(1, 2, 3, 4), measured(1, 2, 0, 4)) == 0.75


def test_agreement_compares_the_same_requests_where_one_has_failed() -> None:
    theirs = Measured(2.0, (Sample(0.5, (0.1,), (2, 7), index=1), Sample(0.5, (0.1,), (3, 7), index=2)))
    assert same_first_token(measured(1, 2, 3), theirs) == 1.0
