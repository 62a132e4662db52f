"""Refuses, in words, what the served model's task is not."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.request import Task
from lora_serve.server.services import SERVICES


def for_task(handler: Handler, *tasks: Task) -> Handler:
    """Let in on servers of these tasks. Raises InvalidRequestError."""

    async def guarded(request: web.Request) -> web.StreamResponse:
        pooling = request.app[SERVICES].spec.pooling
        task = Task.GENERATE if pooling is None else pooling.task
        if task not in tasks:
            wanted = " or ".join(f"--task {name}" for name in tasks)
            message = (
                f"{request.path} needs a server started with {wanted}; this one runs its model with --task {task}."
            )
            raise InvalidRequestError(message, param="model", code="wrong_task")
        return await handler(request)

    return guarded
