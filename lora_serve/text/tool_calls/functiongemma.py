"""FunctionGemma: `<start_function_call>call:name{key:<escape>text<escape>,other:1}<end_function_call>`.

Source: ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices.
"""

from __future__ import annotations

from lora_serve.text.tool_calls.parts.gemma import GemmaFormat


class Format(GemmaFormat):
    """Calls one after another, each between markers."""

    begin, end, quote = "<start_function_call>", "<end_function_call>", "<escape>"
    markers = (begin, end, quote)
