"""The aiohttp application: every route, and who may use it."""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiohttp import web
from aiohttp.typedefs import Middleware

from lora_serve.core.request import Task
from lora_serve.server import models, tokenize
from lora_serve.server.admin import (
    audit,
    deletion,
    keys,
    limits,
    listing,
    registration,
    residency,
    routing,
    sharing,
    tenants,
    upload,
    usage,
    vllm_lora,
)
from lora_serve.server.answers.security_headers import add_security_headers
from lora_serve.server.context import add_headers
from lora_serve.server.guards.authentication import WRONG_KEYS
from lora_serve.server.guards.browser_guard import BrowserGuard
from lora_serve.server.guards.task_guard import for_task
from lora_serve.server.key_uses import noting_uses
from lora_serve.server.middleware import (
    Handler,
    answer,
    for_admin,
    for_anybody,
    for_inference,
    for_managing,
    for_reading,
)
from lora_serve.server.openai.chat import create_chat_completion
from lora_serve.server.openai.completions import create_completion
from lora_serve.server.operation import health
from lora_serve.server.operation.docs_page import get_docs
from lora_serve.server.operation.engine_metrics import get_metrics
from lora_serve.server.operation.openapi import get_openapi
from lora_serve.server.pooling.classify import create_classification
from lora_serve.server.pooling.embeddings import create_embedding
from lora_serve.server.pooling.scores import create_rerank, create_score
from lora_serve.server.services import SERVICES, Services
from lora_serve.server.sockets.connections import CONNECTIONS, Connections
from lora_serve.server.tenant_budgets import following_budgets
from lora_serve.server.tracing import traced
from lora_serve.server.upkeep.loop_lag import probing
from lora_serve.server.upkeep.reconciler import Reconciler
from lora_serve.server.upkeep.residency_meter import metering
from lora_serve.tenancy.authentication.wrong_keys import WrongKeys

_COMPARING = (Task.CLASSIFY, Task.EMBED)


def build_app(services: Services) -> web.Application:
    """Run it with HttpRunner (`handler_cancellation=True`), or a client's disconnect never reaches the handlers."""
    connections = Connections(services.config.connections)
    guard = BrowserGuard(services.config, asks_for_key=services.authenticator.required)
    around: list[Middleware] = [connections.middleware, answer, guard.middleware]
    if services.traces is not None:
        around.insert(1, traced(services.traces))
    app = web.Application(middlewares=around, client_max_size=services.config.max_body_bytes)
    app[SERVICES], app[CONNECTIONS] = services, connections
    app[WRONG_KEYS] = WrongKeys(services.config.attempts.wrong_keys)
    app.cleanup_ctx.extend((_reconciling, noting_uses, following_budgets, metering, connections.watching, probing))
    app.on_response_prepare.append(add_headers)
    app.on_response_prepare.append(add_security_headers)
    app.on_response_prepare.append(guard.add_headers)
    app.add_routes([*_open_routes(), *_inference_routes(), *_adapter_routes(), *_tenant_routes(), *_admin_routes()])
    return app


async def _reconciling(app: web.Application) -> AsyncIterator[None]:
    reconciler = Reconciler(app[SERVICES])
    reconciler.start()
    yield
    await reconciler.stop()


def _open_routes() -> list[web.RouteDef]:
    return [
        web.get("/health", health.get_health),
        web.get("/ping", health.get_health),
        web.post("/ping", health.get_health),
        web.get("/ready", health.get_ready),
        web.get("/version", health.get_version),
        web.get("/metrics", get_metrics),
        web.get("/openapi.json", get_openapi),
        web.get("/docs", get_docs),
    ]


def _inference_routes() -> list[web.RouteDef]:
    return [
        web.post("/v1/completions", for_inference(for_task(create_completion, Task.GENERATE))),
        web.post("/v1/chat/completions", for_inference(for_task(create_chat_completion, Task.GENERATE))),
        web.post("/v1/embeddings", for_inference(for_task(create_embedding, Task.EMBED))),
        *_posts(("/classify", "/v1/classify"), for_task(create_classification, Task.CLASSIFY)),
        *_posts(("/score", "/v1/score"), for_task(create_score, *_COMPARING)),
        *_posts(("/rerank", "/v1/rerank", "/v2/rerank"), for_task(create_rerank, *_COMPARING)),
        web.get("/v1/models", for_reading(models.list_models)),
        web.get("/v1/models/{id:.+}", for_reading(models.get_model)),
        web.post("/tokenize", for_reading(tokenize.tokenize)),
        web.post("/detokenize", for_reading(tokenize.detokenize)),
        web.get("/tokenizer_info", for_reading(tokenize.tokenizer_info)),
    ]


def _posts(paths: tuple[str, ...], handler: Handler) -> list[web.RouteDef]:
    return [web.post(path, for_inference(handler)) for path in paths]


def _adapter_routes() -> list[web.RouteDef]:
    """An id holds slashes, so the routes with a verb behind the id come first."""
    one = "/admin/adapters/{id:.+}"
    return [
        web.post("/admin/adapters", for_managing(registration.register_adapter)),
        web.get("/admin/adapters", for_managing(listing.list_adapters)),
        web.post(f"{one}/pin", for_managing(residency.pin)),
        web.post(f"{one}/unpin", for_managing(residency.unpin)),
        web.post(f"{one}/prefetch", for_admin(residency.prefetch)),
        web.post(f"{one}/evict", for_admin(residency.evict)),
        web.put(f"{one}/route", for_managing(routing.set_route)),
        web.post(f"{one}/rollback", for_managing(routing.roll_back)),
        web.put(f"{one}/sharing", for_admin(sharing.set_sharing)),
        web.put(one, for_managing(upload.upload_adapter)),
        web.get(one, for_managing(listing.get_adapter)),
        web.delete(one, for_managing(deletion.delete_adapter)),
        web.delete("/v1/models/{id:.+}", for_managing(models.delete_model)),
    ]


def _tenant_routes() -> list[web.RouteDef]:
    one = "/admin/tenants/{tenant}"
    return [
        web.post("/admin/tenants", for_admin(tenants.create_tenant)),
        web.get("/admin/tenants", for_managing(tenants.list_tenants)),
        web.get(one, for_managing(tenants.get_tenant)),
        web.patch(one, for_admin(tenants.change_tenant)),
        web.delete(one, for_admin(tenants.delete_tenant)),
        web.post(f"{one}/keys", for_managing(keys.create_key)),
        web.get(f"{one}/keys", for_managing(keys.list_keys)),
        web.delete(f"{one}/keys/{{key}}", for_managing(keys.revoke_key)),
        web.get("/admin/whoami", for_anybody(tenants.whoami)),
    ]


def _admin_routes() -> list[web.RouteDef]:
    return [
        web.get("/admin/aliases", for_admin(routing.list_aliases)),
        web.put("/admin/aliases/{id:.+}", for_admin(routing.set_alias)),
        web.delete("/admin/aliases/{id:.+}", for_admin(routing.remove_alias)),
        web.get("/admin/usage", for_managing(usage.get_usage)),
        web.get("/admin/audit", for_managing(audit.get_audit)),
        web.get("/admin/engine", for_admin(listing.get_engine)),
        web.put("/admin/engine", for_admin(limits.put_engine)),
        web.post("/v1/load_lora_adapter", for_admin(vllm_lora.load_lora_adapter)),
        web.post("/v1/unload_lora_adapter", for_admin(vllm_lora.unload_lora_adapter)),
    ]
