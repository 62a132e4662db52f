"""GLM 4.5 to 4.7: `<tool_call>name`, then `<arg_key>key</arg_key><arg_value>value</arg_value>`, perhaps on lines.

Source: the chat templates of zai-org/GLM-4.6 and zai-org/GLM-4.7.
"""

from __future__ import annotations

from lora_serve.text.tool_calls.base import quoted
from lora_serve.text.tool_calls.qwen3_coder import Format as Qwen3Coder


class Format(Qwen3Coder):
    call_tags = ("", "", "")
    key_tags = ("<arg_key>", "</arg_key>", "<arg_value>")
    value_end = "</arg_value>"
    gap = f"{quoted(chr(10))}?"
    line = ""
    markers = (*Qwen3Coder.markers, *key_tags, value_end)

    @classmethod
    def matches(cls, template: str) -> bool:
        is_hunyuan = "<tool_sep>" in template  # behind the name
        return cls.begin in template and cls.key_tags[0] in template and not is_hunyuan
