"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: vLLM's wire, texts and codes, over our registry."""

from __future__ import annotations

from aiohttp import web

from lora_serve.adapters.admission import copy_files, find_folder
from lora_serve.adapters.checkpoint.digest import adapter_digest
from lora_serve.adapters.registry import Registration
from lora_serve.adapters.stores.files import remove_folder
from lora_serve.core.errors import AdapterNotFoundError, InvalidRequestError
from lora_serve.server.admin.registration import check_new_id, register_and_pin
from lora_serve.server.admin.removal import remove_adapter
from lora_serve.server.errors import WireError
from lora_serve.server.json_body import check_fields, read_json
from lora_serve.server.schemas.admin import LoadLoraFields, UnloadLoraFields
from lora_serve.server.services import SERVICES, Services


class AlreadyLoadedError(Exception):
    """Other content is registered under the name, and load_inplace was not set."""


async def load_lora_adapter(request: web.Request) -> web.StreamResponse:
    """Unlike vLLM, loading the same content again is 200."""
    services = request.app[SERVICES]
    fields = check_fields(LoadLoraFields, await read_json(request))
    name = fields.lora_name
    if not name or not fields.lora_path:
        return _refused(400, "Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput")
    check_new_id(services, name)
    try:
        await register_and_pin(services, name, lambda: _register(services, fields))
    except AlreadyLoadedError:
        message = (
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, "
            "set 'load_inplace' to True."
        )
        return _refused(400, message, "InvalidUserInput")
    except InvalidRequestError as error:
        if error.param != "source":
            raise
        message = f"Loading lora {name} failed: No adapter found for {fields.lora_path[:200]}"
        return _refused(404, message, "NotFoundError")
    return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")


async def unload_lora_adapter(request: web.Request) -> web.StreamResponse:
    services = request.app[SERVICES]
    name = check_fields(UnloadLoraFields, await read_json(request)).lora_name
    if not name:
        return _refused(400, "'lora_name' needs to be provided to unload a LoRA adapter.", "InvalidUserInput")
    try:
        await remove_adapter(services, name, None)
    except AdapterNotFoundError:
        return _refused(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
    return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


def _register(services: Services, fields: LoadLoraFields) -> Registration:
    """On the registry's thread. Other content under a known name must never be served, not even for a moment."""
    known = services.catalog.snapshot.entries.get(fields.lora_name)
    if known is not None and not fields.load_inplace:
        digest = _digest_of(services, fields.lora_path)
        if digest is not None and all(version.digest != digest for version in known.versions):
            raise AlreadyLoadedError
    return services.registry.register_folder(fields.lora_name, fields.lora_path, allow_noop=fields.allow_noop)


def _digest_of(services: Services, source: str) -> str | None:
    """Of a private copy, as the registry would make it. None if a file is missing, which the registry will say."""
    config = services.adapter_config
    copy = services.registry.new_folder()
    try:
        copy_files(find_folder(source, config.roots), copy, config.max_upload_bytes, config.roots)
        return adapter_digest(copy)
    except FileNotFoundError:
        return None
    finally:
        remove_folder(copy)


def _refused(status: int, message: str, kind: str) -> web.Response:
    return WireError(status, message, kind).response()
