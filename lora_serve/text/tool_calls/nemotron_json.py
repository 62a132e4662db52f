"""Nemotron Nano 2 and Llama-Nemotron: `<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>`.

Source: the chat template of nvidia/NVIDIA-Nemotron-Nano-9B-v2.
"""

from __future__ import annotations

from lora_serve.text.tool_calls.granite import Format as Granite


class Format(Granite):
    begins, end = ("<TOOLCALL>",), "</TOOLCALL>"
    markers = (*begins, end)
