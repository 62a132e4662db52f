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


def _begun(*words: str) -> str:
    """A pattern of all that words may begin with."""
    return "|".join(dict.fromkeys(re.escape(word[:n]) for word in words for n in range(len(word) + 1)))


_NAMES = "analysis", "commentary", "final"
_TO = rf" ?(?:{_begun('to=functions.')}|to=functions\.\S*)"
_CHANNEL = rf"{_begun(*_NAMES)}|(?:{'|'.join(_NAMES)})(?:{_TO}(?: \w*)?| (?:{_begun('json')}))"
_BEGUN = re.compile(
    rf"(?:<\|start\|>)?(?:{_begun(AUTHOR)}|(?:{AUTHOR})?{_TO})(?:<\|channel\|>(?:{_CHANNEL}))?(?:<\|constrain\|>\w*)?"
)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a message; both are empty if it names none."""

    channel: str
    recipient: str


def read_header(reader: Reader, begin: str) -> Reading[Header | str]:
    """Read the header of which `begin` has been read, past `<|message|>`; or, if it breaks off, what stands there."""
    written, found = begin, ""
    while found != MESSAGE:
        words = yield from reader.word(_WORDS, MAX_SHORT)
        found = yield from reader.literal(CHANNEL, CONSTRAIN, MESSAGE)
        written += words + found
        if not found or len(written) > 3 * MAX_SHORT:
            return written
    match = _HEADER.fullmatch(written)
    if match is None:
        return written
    role, channel = match["role"], match["channel"] or ""
    named = _NAMED.search(role) or _NAMED.search(channel)
    return Header(channel.split()[0] if channel.strip() else "", named[1] if named else "")


def could_be_cut(text: str) -> bool:
    """True if a header may go on behind this text; else it is text about headers."""
    return _BEGUN.fullmatch(text) is not None
