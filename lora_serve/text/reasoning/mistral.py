"""Mistral's Magistral: `[THINK]...[/THINK]`."""

from __future__ import annotations

from lora_serve.text.reasoning.base import BetweenMarkers


class Format(BetweenMarkers):
    """Reasoning between tags in brackets."""

    opening = ("[THINK]",)
    closing = ("[/THINK]",)
    markers = (*opening, *closing)
