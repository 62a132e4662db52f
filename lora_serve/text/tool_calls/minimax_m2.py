"""MiniMax M2: `<minimax:tool_call>`, then calls `<invoke name="f">` with `<parameter name="key">value</parameter>`.

Source: the chat template of MiniMaxAI/MiniMax-M2.
"""

from __future__ import annotations

from lora_serve.text.tool_calls.qwen3_coder import Format as Qwen3Coder


class Format(Qwen3Coder):
    begin, end = "<minimax:tool_call>", "</minimax:tool_call>"
    call_tags = ('<invoke name="', '">', "</invoke>")
    key_tags = ('<parameter name="', '">')
    line = ""
    holds_all = True
    markers = (begin, end)
