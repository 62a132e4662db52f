"""Changes of a text before it is tokenised for an embedding, as the files of a sentence-transformers folder ask.

`config_sentence_transformers.json` may name a prompt that stands before every text (`default_prompt_name`), and
`sentence_bert_config.json` may ask for small letters.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from lora_serve.core.errors import ModelError

_PROMPTS_FILE = "config_sentence_transformers.json"
_LETTERS_FILE = "sentence_bert_config.json"


@dataclass(frozen=True, slots=True)
class TextPreparation:
    """`prompt` + text, in small letters if `lower`."""

    prompt: str = ""
    lower: bool = False

    def of(self, text: str) -> str:
        """The text in the form on which the model was trained."""
        prepared = self.prompt + text
        return prepared.lower() if self.lower else prepared


AS_IT_IS = TextPreparation()


def preparation_of(model: str) -> TextPreparation:
    """Read the preparation of a folder or hub id; without such files nothing is changed. Raises ModelError."""
    settings = _read(model, _PROMPTS_FILE)
    name, prompts = settings.get("default_prompt_name"), settings.get("prompts") or {}
    if name is not None and (not isinstance(prompts, dict) or not isinstance(prompts.get(name), str)):
        raise ModelError(f"{_PROMPTS_FILE} of {model} names the prompt {name!r}, which it does not hold.")
    return TextPreparation(
        prompts[name] if name is not None else "", _read(model, _LETTERS_FILE).get("do_lower_case") is True
    )


def _read(model: str, name: str) -> dict[str, Any]:
    try:
        found = cached_file(
            model, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )
        value = {} if found is None else json.loads(Path(found).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{name} of {model} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{name} of {model} is no JSON object.")
    return value
