"""The openai package."""

from __future__ import annotations

import json
from typing import Any

import openai
from checking import BASE, PERSON, SQL, SQL_ANSWER, SQL_PROMPT, Server
from person import Person
from tool_task import MODEL as TOOLS_MODEL
from tool_task import QUESTION, TOOLS, answer_of_tool, is_answered


def _client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.v1, api_key=server.key, max_retries=0)


def _asked(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def check_chat(server: Server) -> None:
    """An adapter answers a chat exactly as its training data does."""
    made = _client(server).chat.completions.create(model=SQL, messages=_asked(SQL_PROMPT), temperature=0, max_tokens=64)
    assert made.choices[0].message.content == SQL_ANSWER
    assert made.usage
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens


def check_chat_streamed(server: Server) -> None:
    """The same answer, streamed, with usage in the last chunk."""
    stream = _client(server).chat.completions.create(
        model=SQL,
        messages=_asked(SQL_PROMPT),
        temperature=0,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == SQL_ANSWER
    assert chunks[-1].usage is not None


def check_parse(server: Server) -> None:
    """`chat.completions.parse` with a pydantic model gives an object of it."""
    made = _client(server).chat.completions.parse(
        model=BASE, messages=_asked("Who is it?"), response_format=Person, temperature=0, max_tokens=150
    )
    assert isinstance(made.choices[0].message.parsed, Person)


def check_json_object(server: Server) -> None:
    """`response_format` json_object gives one JSON object."""
    made = _client(server).chat.completions.create(
        model=SQL,
        messages=_asked("A person as JSON."),
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}},
        max_tokens=150,
        seed=7,
    )
    found = json.loads(made.choices[0].message.content or "")
    assert set(found) == {"name", "age", "role"}


def _finished(server: Server, stream: bool) -> None:
    client, messages = _client(server), _asked(QUESTION)
    for _ in range(3):
        if stream:
            with client.chat.completions.stream(
                model=TOOLS_MODEL, messages=messages, tools=TOOLS, temperature=0, max_tokens=100
            ) as events:
                for _event in events:
                    pass
                choice = events.get_final_completion().choices[0]
        else:
            choice = (
                client.chat.completions.create(
                    model=TOOLS_MODEL, messages=messages, tools=TOOLS, temperature=0, max_tokens=100
                )
            ).choices[0]
        if choice.finish_reason != "tool_calls":
            break
        messages.append(choice.message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        for call in choice.message.tool_calls or []:
            result = answer_of_tool(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert len(messages) > 1, "no tool was called"
    assert is_answered(choice.message.content or ""), choice.message.content


def check_tools(server: Server) -> None:
    """A two-step task: the adapter calls a tool, gets its result, and answers with it."""
    _finished(server, stream=False)


def check_tools_streamed(server: Server) -> None:
    """The same task over the client's own streaming helper."""
    _finished(server, stream=True)


def check_required_tool(server: Server) -> None:
    """With `tool_choice` required a model whose template knows tools gives a valid call of one it never saw."""
    tool: Any = {"type": "function", "function": {"name": "save_person", "parameters": PERSON}}
    made = _client(server).chat.completions.create(
        model=TOOLS_MODEL, messages=_asked("Save it."), tools=[tool], tool_choice="required", max_tokens=150
    )
    (call,) = made.choices[0].message.tool_calls or []
    assert call.function.name == "save_person"
    Person.model_validate_json(call.function.arguments)


def check_responses(server: Server) -> None:
    """`responses.create` gives `output_text`."""
    made = _client(server).responses.create(model=SQL, input=SQL_PROMPT, temperature=0, max_output_tokens=64)
    assert made.output_text == SQL_ANSWER
    assert made.status == "completed"


def check_responses_streamed(server: Server) -> None:
    """`responses.stream` gives the text's deltas and the final response."""
    with _client(server).responses.stream(model=SQL, input=SQL_PROMPT, temperature=0, max_output_tokens=64) as events:
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == SQL_ANSWER == events.get_final_response().output_text


def check_completions(server: Server) -> None:
    """Completions of several prompts in one request, with log-probabilities."""
    made = _client(server).completions.create(model=SQL, prompt=["One", "Two"], max_tokens=3, logprobs=2, temperature=0)
    assert [choice.index for choice in made.choices] == [0, 1]
    assert made.choices[0].logprobs
    assert len(made.choices[0].logprobs.tokens or []) <= 3


def check_models(server: Server) -> None:
    """`models.list` and `models.retrieve` name the adapter; an unknown one is a NotFoundError."""
    client = _client(server)
    assert SQL in [model.id for model in client.models.list()]
    assert client.models.retrieve(SQL).id == SQL
    error = None
    try:
        client.chat.completions.create(model="nobody/nothing", messages=_asked("Hello"))
    except openai.NotFoundError as raised:
        error = raised
    assert error is not None, "an unknown model answered"
    assert "nobody/nothing" in error.message
