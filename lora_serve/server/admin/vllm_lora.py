"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: vLLM's wire, texts and codes, over our registry."""

from __future__ import annotations

import logging

from aiohttp import web

from lora_serve.adapters.catalog.edits import OtherContentError, Registration
from lora_serve.adapters.sources.base import RegistrationProgress, Stage
from lora_serve.core.errors import AdapterNotFoundError, ConflictError, InvalidAdapterError, InvalidRequestError
from lora_serve.server.admin.adapters import remove_adapter
from lora_serve.server.admin.protocol import LoadLoraFields, UnloadLoraFields
from lora_serve.server.admin.registration import carry_out, check_new_id, with_quota
from lora_serve.server.answers import WireError
from lora_serve.server.context import CONTEXT
from lora_serve.server.json_body import check_fields, read_json
from lora_serve.server.services import SERVICES

_log = logging.getLogger(__name__)


async def load_lora_adapter(request: web.Request) -> web.StreamResponse:
    """Load an adapter, in vLLM's form.

    Unlike vLLM, loading the same content again is 200.
    """
    services = request.app[SERVICES]
    fields = check_fields(LoadLoraFields, await read_json(request))
    name, note, caller = fields.lora_name, request[CONTEXT].audit, request[CONTEXT].known_caller
    note.subject = name
    if not name or not fields.lora_path:
        return _refused(400, "Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput")
    registration = Registration(
        id=name,
        source=fields.lora_path,
        allow_noop=fields.allow_noop,
        may_change=fields.load_inplace,  # other content under a known name must not be served for a moment
        by_admin=True,  # the route is the admin's alone
    )
    try:
        check_new_id(services, name)
        with_quota(services, registration).check(services.catalog.snapshot)
        await carry_out(request, registration, RegistrationProgress(name, caller.scope, Stage.FETCHING))
    except OtherContentError:
        message = (
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, "
            "set 'load_inplace' to True."
        )
        return _refused(400, message, "InvalidUserInput")
    except InvalidRequestError as error:
        if error.param != "source":
            raise
        _log.warning("load_lora_adapter of %r: %s", name[:200], error)  # names --adapter-root to the operator
        return _refused(404, _not_found(fields, error), "NotFoundError")
    except (InvalidAdapterError, ConflictError) as error:
        return _refused(400, str(error), "BadRequestError")
    return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")


async def unload_lora_adapter(request: web.Request) -> web.StreamResponse:
    """Unload an adapter, in vLLM's form."""
    services = request.app[SERVICES]
    name = check_fields(UnloadLoraFields, await read_json(request)).lora_name
    request[CONTEXT].audit.subject = name
    if not name:
        return _refused(400, "'lora_name' needs to be provided to unload a LoRA adapter.", "InvalidUserInput")
    try:
        await remove_adapter(services, name, None)
    except AdapterNotFoundError:
        return _refused(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
    return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


def _not_found(fields: LoadLoraFields, error: InvalidRequestError) -> str:
    """vLLM's words for a path; a URL, which may hold a signature, is not repeated."""
    reason = f"{error}" if "://" in fields.lora_path else f"No adapter found for {fields.lora_path[:200]}"
    return f"Loading lora {fields.lora_name} failed: {reason}"


def _refused(status: int, message: str, kind: str) -> web.Response:
    return WireError(status, message, kind).response()
