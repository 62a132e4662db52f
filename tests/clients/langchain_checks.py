"""LangChain: ChatOpenAI, structured output, and an agent that calls tools."""

from __future__ import annotations

from typing import Any

from checking import BASE, SQL, SQL_ANSWER, SQL_PROMPT, Server
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from person import Person
from tool_task import MODEL, QUESTION, TOOLS, answer_of_tool, is_answered


def _model(server: Server, name: str, **settings: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=name, base_url=server.v1, api_key=server.key, temperature=0, max_tokens=150, max_retries=0, **settings
    )


def _tools() -> list[StructuredTool]:
    return [
        StructuredTool.from_function(
            func=lambda _name=tool["function"]["name"], **arguments: answer_of_tool(_name, arguments),
            name=tool["function"]["name"],
            description=tool["function"]["description"],
            args_schema=tool["function"]["parameters"],
        )
        for tool in TOOLS
    ]


def check_chat(server: Server) -> None:
    """ChatOpenAI, whole and streamed."""
    model = _model(server, SQL)
    assert model.invoke(SQL_PROMPT).content == SQL_ANSWER
    assert "".join(str(chunk.content) for chunk in model.stream(SQL_PROMPT)) == SQL_ANSWER


def check_with_structured_output(server: Server) -> None:
    """`with_structured_output` by JSON schema gives an object of the class."""
    model = _model(server, BASE).with_structured_output(Person, method="json_schema")
    assert isinstance(model.invoke("Who is it?"), Person)


def check_with_structured_output_by_tool(server: Server) -> None:
    """`with_structured_output` by function calling gives an object of the class."""
    model = _model(server, MODEL).with_structured_output(Person, method="function_calling")
    assert isinstance(model.invoke("Who is it?"), Person)


def check_bind_tools(server: Server) -> None:
    """`bind_tools` gives a message with a tool call."""
    message = _model(server, MODEL).bind_tools(_tools()).invoke(QUESTION)
    assert isinstance(message, AIMessage)
    assert message.tool_calls


def _finished(messages: list[Any]) -> None:
    assert any(isinstance(message, ToolMessage) for message in messages), messages
    assert is_answered(str(messages[-1].content)), messages[-1].content


def check_agent(server: Server) -> None:
    """An agent finishes a two-step tool task."""
    agent = create_agent(_model(server, MODEL), _tools())
    _finished(agent.invoke({"messages": [("user", QUESTION)]})["messages"])


def check_agent_streamed(server: Server) -> None:
    """An agent over a streaming model finishes the same task."""
    agent = create_agent(_model(server, MODEL, streaming=True), _tools())
    last: dict[str, Any] = {}
    for state in agent.stream({"messages": [("user", QUESTION)]}, stream_mode="values"):
        last = state
    _finished(last["messages"])
