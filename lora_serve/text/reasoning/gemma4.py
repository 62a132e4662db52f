"""Gemma 4: `<|channel>thought`, a line break, the reasoning, and `<channel|>`."""

from __future__ import annotations

from lora_serve.text.reasoning.base import ReasoningFormat


class Format(ReasoningFormat):
    opening = ("<|channel>thought\n",)
    closing = ("<channel|>",)
    markers = ("<|channel>", "<channel|>")
