"""Grammars in the text form of `llguidance`, put together: one of several, after the model's reasoning."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SPACE = "/[ \\t\\r\\n]{0,8}/"  # what models write behind their reasoning; more of it would never have to end


@dataclass(frozen=True, slots=True)
class Thinking:
    """The reasoning before an answer: any text up to a marker."""

    opening: tuple[str, ...]
    closing: tuple[str, ...]
    is_open: bool  # the prompt has written the opening marker, which may come again; else it may come, or the answer


def joined_grammars(texts: Sequence[str], thinking: Thinking | None, token_ids: Mapping[str, int]) -> str:
    """A grammar of what one of `texts` allows, after `thinking`.

    `token_ids`: the ids of markers that are single tokens, which are then produced as these tokens.
    """
    if thinking is None and len(texts) == 1:
        return texts[0]
    names = [f"answer_{number}" for number in range(len(texts))]
    parts = [part for name, text in zip(names, texts, strict=True) for part in _named(text, name)]
    answer = "(" + " | ".join(f"@{name}" for name in names) + ")"
    if thinking is None:
        return _written([f"start: {answer}"], parts)
    opened = _choice(thinking.opening, token_ids)
    start = f"start: {opened}? thought {answer}" if thinking.is_open else f"start: ({opened} thought)? {answer}"
    return _written([start, *_thought(thinking.closing, token_ids)], parts)


def _thought(closing: tuple[str, ...], token_ids: Mapping[str, int]) -> list[str]:
    if all(marker in token_ids for marker in closing):
        return [f"thought: TEXT {_choice(closing, token_ids)} {_SPACE}", "TEXT: /(?s:.*)/"]
    ends = "|".join("".join(f"\\x{{{ord(character):x}}}" for character in marker) for marker in closing)
    return [f"thought: ended {_SPACE}", f"ended[lazy]: /(?s:.*)({ends})/"]


def _choice(markers: tuple[str, ...], token_ids: Mapping[str, int]) -> str:
    written = [
        f"<[{token_ids[marker]}]>" if marker in token_ids else json.dumps(marker, ensure_ascii=False)
        for marker in markers
    ]
    return f"({' | '.join(written)})"


def _named(text: str, name: str) -> list[dict[str, Any]]:
    """The parts of a grammar, of which the first gets a name."""
    if not text.lstrip().startswith("{"):
        return [{"name": name, "lark_grammar": text}]
    first, *others = json.loads(text)["grammars"]
    return [{**first, "name": name}, *others]


def _written(rules: list[str], parts: list[dict[str, Any]]) -> str:
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules) + "\n"}, *parts]}, ensure_ascii=False)
