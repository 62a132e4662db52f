"""OpenAI's harmony, the format of gpt-oss: an answer is messages, each with a header that names channel and recipient.

`<|start|>assistant<|channel|>final<|message|>...<|end|>`; the prompt has written the first `<|start|>assistant`. A call
of a tool is a message to `functions.name`, which stands in either part of the header and ends with `<|call|>`.
Source: docs/format.md of github.com/openai/harmony.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lora_serve.text.pieces import MAX_SHORT, Reader, Reading

START, CHANNEL, CONSTRAIN = "<|start|>", "<|channel|>", "<|constrain|>"
MESSAGE, END, CALL = "<|message|>", "<|end|>", "<|call|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL)
AUTHOR = "assistant"
RECIPIENT = "to="
_WORDS = re.compile(r"[^<]+")
_NAMED = re.compile(rf"(?:^|\s){RECIPIENT}(\S+)")
_HEADER = re.compile(
    r"(?:<\|start\|>assistant\b)?(?P<role>[^<]*)(?:<\|channel\|>(?P<channel>[^<]*))?(?:<\|constrain\|>[^<]*)?<\|message\|>"
)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a message; both are empty if it names none."""

    channel: str
    recipient: str


def read_header(reader: Reader, begin: str) -> Reading[Header | None]:
    """Read the header of which `begin` has been read, past `<|message|>`; None if there is none, or it breaks off."""
    written, found = begin, ""
    while found != MESSAGE:
        words = yield from reader.word(_WORDS, MAX_SHORT)
        found = yield from reader.literal(CHANNEL, CONSTRAIN, MESSAGE)
        written += words + found
        if not found or len(written) > 3 * MAX_SHORT:
            return None
    match = _HEADER.fullmatch(written)
    if match is None:
        return None
    role, channel = match["role"], match["channel"] or ""
    named = _NAMED.search(role) or _NAMED.search(channel)
    return Header(channel.split()[0] if channel.strip() else "", named[1] if named else "")
