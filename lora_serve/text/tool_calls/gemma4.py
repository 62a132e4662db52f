"""Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>`.

Source: the chat template of google/gemma-4-E2B-it.
"""

from __future__ import annotations

from lora_serve.text.tool_calls.parts.gemma import GemmaFormat


class Format(GemmaFormat):
    """Calls one after another, each between markers."""

    begin, end, quote = "<|tool_call>", "<tool_call|>", '<|"|>'
    markers = (begin, end, quote)
