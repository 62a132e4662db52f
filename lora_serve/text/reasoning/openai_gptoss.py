"""GPT-OSS: the harmony format's `analysis` channel before its `final` one.

Source: cookbook.openai.com/articles/openai-harmony. Calls in its `commentary` channel are not read.
"""

from __future__ import annotations

from lora_serve.text.reasoning.base import ReasoningFormat

_FINAL = "<|channel|>final<|message|>"


class Format(ReasoningFormat):
    opening = ("<|channel|>analysis<|message|>",)
    closing = (f"<|end|><|start|>assistant{_FINAL}",)
    skipping = (_FINAL,)
    markers = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")

    @classmethod
    def matches(cls, template: str) -> bool:
        return cls.opening[0] in template
