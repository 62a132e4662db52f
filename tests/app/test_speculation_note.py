"""The line of log that says whether tokens are guessed."""

from __future__ import annotations

import pytest

from lora_serve.app.launch import speculation_note


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("auto", "speculation: auto, up to 16 tokens a row and step (--speculate off: none)"),
        ("off", "speculation: off (--speculate auto: as many tokens as pay)"),
        ("4", "speculation: up to 4 tokens a row and step (--speculate auto: as many as pay)"),
    ],
)
def test_log_says_how_many_tokens_are_guessed(setting: str, words: str) -> None:
    assert speculation_note(setting) == words
