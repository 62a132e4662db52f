"""Pydantic AI over its OpenAI model."""

from __future__ import annotations

from checking import BASE, SQL, SQL_ANSWER, SQL_PROMPT, Server
from person import Person
from pydantic_ai import Agent, NativeOutput, Tool
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from tool_task import MODEL, QUESTION, TOOLS, answer_of_tool, is_answered

SETTINGS = ModelSettings(temperature=0, max_tokens=150)


def _model(server: Server, name: str) -> OpenAIChatModel:
    return OpenAIChatModel(name, provider=OpenAIProvider(base_url=server.v1, api_key=server.key))


def check_text(server: Server) -> None:
    """An agent without tools answers."""
    assert Agent(_model(server, SQL), model_settings=SETTINGS).run_sync(SQL_PROMPT).output == SQL_ANSWER


def check_native_output(server: Server) -> None:
    """Native output gives an object of the class."""
    agent = Agent(_model(server, BASE), output_type=NativeOutput(Person), model_settings=SETTINGS, retries=0)
    assert isinstance(agent.run_sync("Who is it?").output, Person)


def check_agent(server: Server) -> None:
    """An agent finishes a two-step tool task."""
    tools = [
        Tool.from_schema(
            function=lambda _name=tool["function"]["name"], **arguments: answer_of_tool(_name, arguments),
            name=tool["function"]["name"],
            description=tool["function"]["description"],
            json_schema=tool["function"]["parameters"],
        )
        for tool in TOOLS
    ]
    answer = Agent(_model(server, MODEL), tools=tools, model_settings=SETTINGS).run_sync(QUESTION)
    assert is_answered(answer.output), answer.output
