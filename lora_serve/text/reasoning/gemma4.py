"""Gemma 4: `<|channel>thought`, a line break, the reasoning, and `<channel|>`."""

from __future__ import annotations

from lora_serve.text.reasoning.base import BetweenMarkers


class Format(BetweenMarkers):
    """Reasoning in a channel of its own."""

    opening = ("<|channel>thought\n",)
    closing = ("<channel|>",)
    markers = ("<|channel>", "<channel|>")
