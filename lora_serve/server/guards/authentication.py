"""Whose key a request has; an address that sends many wrong ones is told to wait."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from lora_serve.core.errors import WrongKeyError
from lora_serve.core.tenant import Caller
from lora_serve.server.services import SERVICES
from lora_serve.tenancy.authentication.authenticator import Authenticator
from lora_serve.tenancy.authentication.wrong_keys import WrongKeys

Authenticate = Callable[[Authenticator, str | None], Caller]

WRONG_KEYS = web.AppKey("wrong_keys", WrongKeys)


def authenticated(request: web.Request, authenticate: Authenticate) -> Caller:
    """Raises what `authenticate` raises, and WrongKeysError in place of a WrongKeyError too many.

    The address is the connection's: what a header says of another is anybody's word.
    """
    try:
        return authenticate(request.app[SERVICES].authenticator, request.headers.get("Authorization"))
    except WrongKeyError:
        request.app[WRONG_KEYS].note(request.remote or "")
        raise
