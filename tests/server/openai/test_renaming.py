"""Errors of a chat in the words of another API: whole names of fields only."""

from __future__ import annotations

import pytest

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.openai.translated import with_names

NAMES = {"response_format.json_schema": "text.format", "messages": "input", "stop": "ends", ".function.": "."}


@pytest.mark.parametrize(
    ("param", "message", "expected"),
    [
        ("messages[0].role", "`messages[0].role` must be", ("input[0].role", "`input[0].role` must be")),
        ("stop_token_ids", "`stop_token_ids`: no", ("stop_token_ids", "`stop_token_ids`: no")),
        ("stop", "`stop`: no messages", ("ends", "`ends`: no messages")),
        ("response_format.json_schema.schema", "x", ("text.format.schema", "x")),
        ("tools[1].function.name", "`tools[1].function.name` is", ("tools[1].name", "`tools[1].name` is")),
    ],
)
def test_names_are_the_callers(param: str, message: str, expected: tuple[str, str]) -> None:
    with pytest.raises(InvalidRequestError) as caught, with_names(NAMES):
        raise InvalidRequestError(message, param=param, code="kept")
    assert (caught.value.param, str(caught.value), caught.value.code) == (*expected, "kept")
