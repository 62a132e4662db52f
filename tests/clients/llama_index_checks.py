"""LlamaIndex over OpenAILike."""

from __future__ import annotations

import asyncio
from typing import Any

from checking import BASE, SQL, SQL_ANSWER, SQL_PROMPT, Server
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from person import Person
from tool_task import MODEL, QUESTION, is_answered, typed_tools


def _model(server: Server, name: str, **settings: Any) -> OpenAILike:
    return OpenAILike(
        model=name,
        api_base=server.v1,
        api_key=server.key,
        is_chat_model=True,
        context_window=512,
        max_tokens=150,
        temperature=0,
        max_retries=0,
        **settings,
    )


def check_chat(server: Server) -> None:
    """`chat`, whole and streamed."""
    model, messages = _model(server, SQL), [ChatMessage(role="user", content=SQL_PROMPT)]
    assert model.chat(messages).message.content == SQL_ANSWER
    assert "".join(chunk.delta or "" for chunk in model.stream_chat(messages)) == SQL_ANSWER


def check_structured(server: Server) -> None:
    """`as_structured_llm` gives an object of the class."""
    model = _model(server, BASE, should_use_structured_outputs=True).as_structured_llm(Person)
    assert isinstance(model.complete("Who is it?").raw, Person)


def check_agent(server: Server) -> None:
    """A FunctionAgent finishes a two-step tool task, streaming."""
    tools = [FunctionTool.from_defaults(fn=tool) for tool in typed_tools()]
    agent = FunctionAgent(tools=tools, llm=_model(server, MODEL, is_function_calling_model=True))

    async def ask() -> str:
        return str(await agent.run(user_msg=QUESTION))

    answer = asyncio.run(ask())
    assert is_answered(answer), answer
