"""Granite 3.2: plain words, `Here is my thought process:` and `Here is my response:`."""

from __future__ import annotations

from lora_serve.text.reasoning.base import ReasoningFormat


class Format(ReasoningFormat):
    opening = ("Here is my thought process:", "Here's my thought process:")
    closing = ("Here is my response:", "Here's my response:")
