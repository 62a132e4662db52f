"""Mistral's Magistral: `[THINK]...[/THINK]`."""

from __future__ import annotations

from lora_serve.text.reasoning.base import ReasoningFormat


class Format(ReasoningFormat):
    opening = ("[THINK]",)
    closing = ("[/THINK]",)
    markers = (*opening, *closing)
