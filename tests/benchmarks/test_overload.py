"""What the overload benchmark makes of its answers."""

from __future__ import annotations

import pytest

from benchmarks.overload import Answer, _first_token, _row


def test_goodput_counts_tokens_of_early_first_tokens_only() -> None:
    answers = [
        Answer(200, 3.0, first_token=0.5, num_tokens=10),
        Answer(200, 3.0, first_token=2.5, num_tokens=10),
        Answer(503, 0.01, retry_after=2.0),
        Answer(503, 0.03, retry_after=2.0),
        Answer(0, 9.0),
    ]
    again = [Answer(200, 1.0, first_token=0.1, num_tokens=10), Answer(503, 0.01)]
    row = _row(answers, again, seconds=4.0, limit=2.0)
    assert row["goodput"] == 20 / 4
    assert (row["sent"], row["answered"], row["refused"], row["failed"]) == (5, 2, 2, 1)
    assert row["refusal_ms_p50"] == pytest.approx(20)
    assert (row["came_again"], row["came_again_and_got_in"]) == (2, 1)
    assert row["retry_after_p50"] == 2.0


def test_row_without_refusals_or_answers_has_zeros() -> None:
    row = _row([], [], seconds=1.0, limit=2.0)
    assert set(row.values()) == {0, 1.0}


def test_first_token_is_queue_load_and_prefill() -> None:
    assert _first_token("queue;dur=100.00, load;dur=20.00, prefill;dur=3.00, decode;dur=900.00") == pytest.approx(0.123)
