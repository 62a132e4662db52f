"""Instructor, in its modes for JSON schemas and for tools."""

from __future__ import annotations

import instructor
import openai
from checking import BASE, Server
from person import Person
from tool_task import MODEL


def _person(server: Server, mode: instructor.Mode, model: str) -> Person:
    client = instructor.from_openai(openai.OpenAI(base_url=server.v1, api_key=server.key, max_retries=0), mode=mode)
    return client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Who is it?"}],
        response_model=Person,
        max_retries=0,
        max_tokens=150,
        temperature=0,
    )


def check_json_schema(server: Server) -> None:
    """Mode JSON_SCHEMA gives an object of the class at the first try."""
    assert isinstance(_person(server, instructor.Mode.JSON_SCHEMA, BASE), Person)


def check_tools(server: Server) -> None:
    """Mode TOOLS gives an object of the class at the first try."""
    assert isinstance(_person(server, instructor.Mode.TOOLS, MODEL), Person)
