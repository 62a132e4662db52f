"""The aiohttp application: every route, and who may use it."""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiohttp import web
from aiohttp.typedefs import Middleware

from lora_serve.core.request import Task
from lora_serve.server import health, models, tokenize
from lora_serve.server.admin import deletion, limits, listing, registration, residency, routing, upload, vllm_lora
from lora_serve.server.context import add_headers
from lora_serve.server.engine_metrics import get_metrics
from lora_serve.server.middleware import Handler, answer, for_admin, for_inference, for_reading
from lora_serve.server.openai.chat import create_chat_completion
from lora_serve.server.openai.completions import create_completion
from lora_serve.server.pooling.classify import create_classification
from lora_serve.server.pooling.embeddings import create_embedding
from lora_serve.server.pooling.rerank import create_rerank
from lora_serve.server.pooling.score import create_score
from lora_serve.server.reconciler import Reconciler
from lora_serve.server.security_headers import add_security_headers
from lora_serve.server.services import SERVICES, Services
from lora_serve.server.task_guard import for_task
from lora_serve.server.tracing import traced

_COMPARING = (Task.CLASSIFY, Task.EMBED)


def build_app(services: Services) -> web.Application:
    """Run it with HttpRunner (`handler_cancellation=True`), or a client's disconnect never reaches the handlers."""
    around: list[Middleware] = [answer] if services.traces is None else [traced(services.traces), answer]
    app = web.Application(middlewares=around, client_max_size=services.config.max_body_bytes)
    app[SERVICES] = services
    app.cleanup_ctx.append(_reconciling)
    app.on_response_prepare.append(add_headers)
    app.on_response_prepare.append(add_security_headers)
    app.add_routes([*_open_routes(), *_inference_routes(), *_admin_routes()])
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


def _admin_routes() -> list[web.RouteDef]:
    """An id holds slashes, so the routes with a verb behind the id come first."""
    one = "/admin/adapters/{id:.+}"
    return [
        web.post("/admin/adapters", for_admin(registration.register_adapter)),
        web.get("/admin/adapters", for_admin(listing.list_adapters)),
        web.post(f"{one}/pin", for_admin(residency.pin)),
        web.post(f"{one}/unpin", for_admin(residency.unpin)),
        web.post(f"{one}/prefetch", for_admin(residency.prefetch)),
        web.post(f"{one}/evict", for_admin(residency.evict)),
        web.put(f"{one}/route", for_admin(routing.set_route)),
        web.post(f"{one}/rollback", for_admin(routing.roll_back)),
        web.get("/admin/aliases", for_admin(routing.list_aliases)),
        web.put("/admin/aliases/{id:.+}", for_admin(routing.set_alias)),
        web.delete("/admin/aliases/{id:.+}", for_admin(routing.remove_alias)),
        web.put(one, for_admin(upload.upload_adapter)),
        web.get(one, for_admin(listing.get_adapter)),
        web.delete(one, for_admin(deletion.delete_adapter)),
        web.get("/admin/engine", for_admin(listing.get_engine)),
        web.put("/admin/engine", for_admin(limits.put_engine)),
        web.delete("/v1/models/{id:.+}", for_admin(models.delete_model)),
        web.post("/v1/load_lora_adapter", for_admin(vllm_lora.load_lora_adapter)),
        web.post("/v1/unload_lora_adapter", for_admin(vllm_lora.unload_lora_adapter)),
    ]
