"""The anthropic package."""

from __future__ import annotations

import anthropic
from checking import SQL, SQL_ANSWER, SQL_PROMPT, Server


def _client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=server.key, max_retries=0)


def check_messages(server: Server) -> None:
    """`messages.create` gives one text block."""
    made = _client(server).messages.create(
        model=SQL, max_tokens=64, extra_body={"temperature": 0}, messages=[{"role": "user", "content": SQL_PROMPT}]
    )
    assert [block.text for block in made.content if block.type == "text"] == [SQL_ANSWER]
    assert made.stop_reason == "end_turn"


def check_messages_streamed(server: Server) -> None:
    """`messages.stream` gives the same text."""
    with _client(server).messages.stream(
        model=SQL, max_tokens=64, extra_body={"temperature": 0}, messages=[{"role": "user", "content": SQL_PROMPT}]
    ) as stream:
        assert "".join(stream.text_stream) == SQL_ANSWER


def check_unknown_model(server: Server) -> None:
    """An unknown model is a NotFoundError in Anthropic's shape."""
    error = None
    try:
        _client(server).messages.create(
            model="nobody/nothing", max_tokens=4, messages=[{"role": "user", "content": "Hello"}]
        )
    except anthropic.NotFoundError as raised:
        error = raised
    assert error is not None, "an unknown model answered"
    assert isinstance(error.body, dict)
    assert error.body["type"] == "error"
