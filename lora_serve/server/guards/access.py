"""The guard around a route's handler, which decides who may call it, and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiohttp import web
from aiohttp.typedefs import Handler

from lora_serve.core.errors import AuthenticationError, InvalidRequestError, WrongKeyError
from lora_serve.core.request import Task
from lora_serve.core.tenant import Caller
from lora_serve.server.context import CONTEXT
from lora_serve.server.route import Access, Route
from lora_serve.server.services import SERVICES
from lora_serve.tenancy.authenticator import Authenticator, WrongKeys

Authenticate = Callable[[Authenticator, str | None], Caller]

WRONG_KEYS = web.AppKey("wrong_keys", WrongKeys)
_AUTHENTICATE: Mapping[Access, Authenticate] = {
    Access.ANY_KEY: Authenticator.anybody,
    Access.MODELS: Authenticator.inference,
    Access.INFERENCE: Authenticator.inference,
    Access.TENANT_ADMIN: Authenticator.managing,
    Access.ADMIN: Authenticator.admin,
}


def authenticated(request: web.Request, authenticate: Authenticate) -> Caller:
    """The caller whose key the request has; Anthropic's clients send theirs in a header of another name, Azure's in a
    third, and a proxy may add one that is not ours: the first right key counts. Raises what `authenticate` raises, and
    WrongKeysError if the address has sent too many wrong keys.

    The address is the connection's: a header that names another could be anybody's invention.
    """
    keys = (request.headers.get(name) for name in ("X-Api-Key", "Api-Key"))
    refusals = list[AuthenticationError]()
    for credentials in (request.headers.get("Authorization"), *(f"Bearer {key}" for key in keys if key)):
        try:
            return authenticate(request.app[SERVICES].authenticator, credentials)
        except AuthenticationError as error:
            refusals.append(error)
    for refusal in refusals:
        if isinstance(refusal, WrongKeyError):
            request.app[WRONG_KEYS].note(request.remote or "")
    raise refusals[-1]


def guarded(route: Route) -> Handler:
    """The route's handler, for the callers that the route lets in. The others are told why not: AuthenticationError,
    ForbiddenError, NotReadyError, CapacityError, or InvalidRequestError if the served model has another task.
    """
    if route.access is Access.PUBLIC:
        return route.handler
    around = _for_inference if route.access is Access.INFERENCE else _for_others

    async def guard(request: web.Request) -> web.StreamResponse:
        return await around(request, route)

    return guard


async def _for_inference(request: web.Request, route: Route) -> web.StreamResponse:
    services = request.app[SERVICES]
    caller = _enter(request, route.access)
    with services.lifecycle.inside():
        services.quotas.check(caller)
        if services.overflow is None or not services.overflow.may_take(request, caller.tenant):
            services.client.gate.check()  # before a body is read and a prompt tokenised for nothing
        _check_task(request, route.tasks)
        return await route.handler(request)


async def _for_others(request: web.Request, route: Route) -> web.StreamResponse:
    """The handler of an admin route looks itself at whose adapters and keys a call is about."""
    if route.access is not Access.MODELS:
        _enter(request, Access.ANY_KEY)  # whose act it is, if it is refused
    caller = _enter(request, route.access)
    if route.is_act:
        services = request.app[SERVICES]
        await services.quotas.begin_act(caller, services.config.acts_of(caller.role))
        await services.check_store(route.is_deletion)  # one that takes no changes could not even keep the audit line
    return await route.handler(request)


def _enter(request: web.Request, access: Access) -> Caller:
    return request[CONTEXT].enter(lambda: authenticated(request, _AUTHENTICATE[access]))


def _check_task(request: web.Request, tasks: tuple[Task, ...]) -> None:
    task = request.app[SERVICES].spec.task
    if tasks and task not in tasks:
        wanted = " or ".join(f"--task {name}" for name in tasks)
        message = f"{request.path} needs a server started with {wanted}; this one runs its model with --task {task}."
        raise InvalidRequestError(message, param="model", code="wrong_task")
