"""Figures as people read them."""

from __future__ import annotations

import pytest

from lora_serve.commands.output import byte_seconds_text, bytes_text, seconds_text


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0 ms"),
        (0.0001, "< 1 ms"),
        (0.0123, "12 ms"),
        (12.34, "12.3 s"),
        (754, "12m 34s"),
        (9000, "2h 30m"),
        (1e8, "27,777h 46m"),
    ],
)
def test_seconds_are_shown_in_the_unit_that_fits(seconds: float, shown: str) -> None:
    assert seconds_text(seconds) == shown


def test_bytes_times_seconds_keep_their_unit() -> None:
    assert byte_seconds_text(4.90659e08) == "467.9 MiB·s"


@pytest.mark.parametrize(
    ("count", "shown"), [(999, "999 B"), (1536, "1.5 KiB"), (1_234_567, "1.2 MiB"), (2**42, "4.0 TiB")]
)
def test_bytes_are_shown_in_the_consoles_units(count: int, shown: str) -> None:
    assert bytes_text(count) == shown
