"""DeepSeek R1, Qwen 3 and many after them: `<think>...</think>`, of which the template may write the beginning."""

from __future__ import annotations

from lora_serve.text.reasoning.base import ReasoningFormat


class Format(ReasoningFormat):
    opening = ("<think>",)
    closing = ("</think>",)
    markers = (*opening, *closing)
