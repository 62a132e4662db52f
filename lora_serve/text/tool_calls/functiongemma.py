"""FunctionGemma: `<start_function_call>call:name{key:<escape>text<escape>,other:1}<end_function_call>`.

Source: ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices.
"""

from __future__ import annotations

from lora_serve.text.tool_calls.gemma4 import Format as Gemma4


class Format(Gemma4):
    begin, end, quote = "<start_function_call>", "<end_function_call>", "<escape>"
    markers = (begin, end, quote)
