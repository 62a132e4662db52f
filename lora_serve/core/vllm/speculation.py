"""vLLM's --speculative-config: the one method of its that there is here, and the others refused in words."""

from __future__ import annotations

from typing import Any

from lora_serve.core.setting_types import MAX_DRAFT
from lora_serve.core.strict_json import JsonError, parse_json

_METHODS = ("ngram", "ngram_gpu")
_MEANS_NOTHING = {"prompt_lookup_max", "prompt_lookup_min"}  # the longest and the shortest match
_KNOWN = {"method", "num_speculative_tokens", "model", *_MEANS_NOTHING}


def read_speculative_config(text: str) -> str:
    """The value of --speculate. Raises ValueError for what is not done here."""
    try:
        config = parse_json(text.encode())
    except JsonError as error:
        raise ValueError(f"expected a JSON object ({error.reason})") from None
    if not isinstance(config, dict):
        raise ValueError("expected a JSON object")
    method = config.get("method", "ngram" if config.get("model") in _METHODS else None)
    if method not in _METHODS:
        raise ValueError(
            "tokens are guessed from prompt and earlier answers, without a second model:"
            ' give {"method": "ngram"}, or --speculate N'
        )
    if unknown := sorted(config.keys() - _KNOWN):
        raise ValueError(f"{', '.join(unknown)[:200]}: not known for the method ngram")
    return _count(config.get("num_speculative_tokens", "auto"))


def ignored_in_speculative_config(text: str) -> str:
    """The parts of what `read_speculative_config` took that mean nothing here, with the reason; else nothing."""
    found = sorted(_MEANS_NOTHING & parse_json(text.encode()).keys())
    return f"{', '.join(found)}: the lengths of matches that pay are learned" if found else ""


def _count(value: Any) -> str:
    if value != "auto" and not (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_DRAFT):
        raise ValueError(f"num_speculative_tokens is a number from 1 to {MAX_DRAFT}")
    return str(value)
