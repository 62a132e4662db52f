"""The table of all routes. Router, guards, audit log, /openapi.json and tests are made from it."""

from __future__ import annotations

from typing import Any

from aiohttp.typedefs import Handler
from pydantic import BaseModel

from lora_serve.console.live import frames
from lora_serve.core.request import Task
from lora_serve.server import console, models
from lora_serve.server.admin import adapters, engine, records, registration, tenants, upload, vllm_lora
from lora_serve.server.admin import answers as cards
from lora_serve.server.admin import protocol as asked
from lora_serve.server.anthropic import protocol as anthropic
from lora_serve.server.anthropic.serving import count_tokens, create_message
from lora_serve.server.openai import tokens
from lora_serve.server.openai.chat import create_chat_completion
from lora_serve.server.openai.completions import create_completion
from lora_serve.server.openai.responses import protocol as responses
from lora_serve.server.openai.responses.serving import create_response
from lora_serve.server.operation import health, metrics, openapi
from lora_serve.server.pooling import embeddings, scores
from lora_serve.server.route import EVENTS, JSON, Access, AnswerKind, Route, RouteTable
from lora_serve.server.schemas import generated, inference, pooling

_PUBLIC, _KEY, _MODELS, _INFERENCE = Access.PUBLIC, Access.ANY_KEY, Access.MODELS, Access.INFERENCE
_OWN, _ADMIN = Access.TENANT_ADMIN, Access.ADMIN
_TEXT, _PAGE, _FILES = ("text/plain",), ("text/html",), ("text/javascript", "text/css", "image/svg+xml")
_GENERATE, _EMBED, _CLASSIFY, _COMPARE = (Task.GENERATE,), (Task.EMBED,), (Task.CLASSIFY,), (Task.CLASSIFY, Task.EMBED)
_ADAPTER, _ALIAS, _TENANT = "/admin/adapters/{id}", "/admin/aliases/{id}", "/admin/tenants/{tenant}"


def _generation(
    path: str, handler: Handler, body: type[BaseModel], answer: AnswerKind, *events: AnswerKind, **more: Any
) -> Route:
    more |= {"answers": (JSON, EVENTS), "answer": answer, "event": events, "tasks": _GENERATE}
    return Route("POST", path, _INFERENCE, handler, body, **more)


def _pooled(path: str, handler: Handler, body: type[BaseModel], answer: AnswerKind, tasks: tuple[Task, ...]) -> Route:
    return Route("POST", path, _INFERENCE, handler, body, answer=answer, tasks=tasks)


# The first route that fits is taken. An id may hold slashes, so the routes with a verb behind the id come first.
TABLE = RouteTable(
    Route("GET", "/health", _PUBLIC, health.get_health, is_probe=True, answer=health.Health),
    Route("GET", "/ping", _PUBLIC, health.get_health, is_probe=True, answer=health.Health),
    Route("POST", "/ping", _PUBLIC, health.get_health, is_probe=True, answer=health.Health),
    Route("GET", "/ready", _PUBLIC, health.get_ready, is_probe=True, answer=health.Readiness),
    Route("GET", "/metrics", _PUBLIC, metrics.get_metrics, answers=_TEXT, is_probe=True),
    Route("GET", "/version", _PUBLIC, health.get_version, answer=health.Version),
    Route("GET", "/openapi.json", _PUBLIC, openapi.get_openapi, answer=openapi.OpenApiDocument),
    Route("GET", "/docs", _PUBLIC, openapi.get_docs, answers=_PAGE),
    Route("GET", "/", _PUBLIC, console.get_root, answers=(JSON, *_PAGE), answer=console.Root),
    Route("GET", "/ui", _PUBLIC, console.get_index, answers=_PAGE),
    Route("GET", "/ui/about.json", _PUBLIC, console.get_about, is_probe=True, answer=console.ConsoleFacts),
    Route("GET", "/ui/{file}", _PUBLIC, console.get_file, answers=_FILES),
    _generation(
        "/v1/completions",
        create_completion,
        inference.CompletionFields,
        generated.Completion,
        generated.CompletionChunk,
    ),
    _generation(
        "/v1/chat/completions",
        create_chat_completion,
        inference.ChatFields,
        generated.ChatCompletion,
        generated.ChatChunk,
    ),
    _generation(
        "/v1/responses",
        create_response,
        responses.ResponseFields,
        responses.Response,
        responses.ResponseEvent,
        responses.ResponseError,
    ),
    _generation(
        "/inference/v1/generate",
        tokens.generate_tokens,
        tokens.GenerateFields,
        tokens.GeneratedTokens,
        tokens.TokensChunk,
    ),
    _generation(
        "/v1/messages",
        create_message,
        anthropic.MessageFields,
        anthropic.AnthropicMessage,
        anthropic.MessageEvent,
        anthropic.AnthropicError,
        refusal=anthropic.anthropic_error,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        _MODELS,
        count_tokens,
        anthropic.CountTokensFields,
        answer=anthropic.TokenCount,
        tasks=_GENERATE,
        refusal=anthropic.anthropic_error,
    ),
    _pooled("/v1/embeddings", embeddings.create_embedding, pooling.EmbeddingFields, embeddings.Embeddings, _EMBED),
    _pooled("/classify", scores.create_classification, pooling.ClassifyFields, scores.Labels, _CLASSIFY),
    _pooled("/v1/classify", scores.create_classification, pooling.ClassifyFields, scores.Labels, _CLASSIFY),
    _pooled("/score", scores.create_score, pooling.ScoreFields, scores.Scores, _COMPARE),
    _pooled("/v1/score", scores.create_score, pooling.ScoreFields, scores.Scores, _COMPARE),
    _pooled("/rerank", scores.create_rerank, pooling.RerankFields, scores.Ranking, _COMPARE),
    _pooled("/v1/rerank", scores.create_rerank, pooling.RerankFields, scores.Ranking, _COMPARE),
    _pooled("/v2/rerank", scores.create_rerank, pooling.RerankFields, scores.Ranking, _COMPARE),
    Route("GET", "/v1/models", _MODELS, models.list_models, answer=models.ModelList),
    Route("GET", "/v1/models/{id}", _MODELS, models.get_model, answer=models.ModelCard),
    Route("DELETE", "/v1/models/{id}", _OWN, models.delete_model, answer=models.DeletedModel),
    Route(
        "POST",
        "/tokenize",
        _MODELS,
        tokens.tokenize,
        (tokens.TokenizeTextFields, tokens.TokenizeChatFields),
        answer=tokens.Tokens,
    ),
    Route("POST", "/detokenize", _MODELS, tokens.detokenize, tokens.DetokenizeFields, answer=tokens.Text),
    Route("GET", "/tokenizer_info", _MODELS, tokens.tokenizer_info, answer=tokens.TokenizerInfo),
    Route(
        "POST", "/admin/adapters", _OWN, registration.register_adapter, asked.RegisterFields, answer=cards.AdapterCard
    ),
    Route(
        "GET",
        "/admin/adapters",
        _OWN,
        adapters.list_adapters,
        query=asked.AdaptersQuery,
        answer=(cards.AdapterPage, cards.RowPage),
    ),
    Route("GET", "/admin/registrations", _OWN, registration.list_registrations, answer=cards.RegistrationList),
    Route("POST", f"{_ADAPTER}/pin", _OWN, adapters.pin, answer=cards.AdapterCard),
    Route("POST", f"{_ADAPTER}/unpin", _OWN, adapters.unpin, answer=cards.AdapterCard),
    Route("POST", f"{_ADAPTER}/prefetch", _ADMIN, adapters.prefetch, answer=cards.AdapterCard),
    Route("POST", f"{_ADAPTER}/evict", _ADMIN, adapters.evict, answer=cards.AdapterCard),
    Route("PUT", f"{_ADAPTER}/route", _OWN, adapters.set_route, asked.RouteFields, answer=cards.AdapterCard),
    Route("POST", f"{_ADAPTER}/rollback", _OWN, adapters.roll_back, answer=cards.AdapterCard),
    Route("PUT", f"{_ADAPTER}/sharing", _ADMIN, adapters.set_sharing, asked.SharingFields, answer=cards.AdapterCard),
    Route("PUT", _ADAPTER, _OWN, upload.upload_adapter, upload.BODY, asked.UploadFields, answer=cards.AdapterCard),
    Route("GET", _ADAPTER, _OWN, adapters.get_adapter, answer=cards.AdapterCard),
    Route("PATCH", _ADAPTER, _OWN, registration.set_metadata, asked.MetadataFields, answer=cards.AdapterCard),
    Route("DELETE", _ADAPTER, _OWN, adapters.delete_adapter, query=asked.DeletionQuery, answer=cards.DeletedAdapter),
    Route("GET", "/admin/aliases", _ADMIN, adapters.list_aliases, answer=cards.AliasList),
    Route("PUT", _ALIAS, _ADMIN, adapters.set_alias, asked.AliasFields, answer=cards.Alias),
    Route("DELETE", _ALIAS, _ADMIN, adapters.remove_alias, answer=cards.DeletedAlias),
    Route("POST", "/v1/load_lora_adapter", _ADMIN, vllm_lora.load_lora_adapter, asked.LoadLoraFields, answers=_TEXT),
    Route(
        "POST", "/v1/unload_lora_adapter", _ADMIN, vllm_lora.unload_lora_adapter, asked.UnloadLoraFields, answers=_TEXT
    ),
    Route("POST", "/admin/tenants", _ADMIN, tenants.create_tenant, asked.CreateTenantFields, answer=cards.TenantCard),
    Route("GET", "/admin/tenants", _OWN, tenants.list_tenants, query=asked.PageQuery, answer=cards.TenantPage),
    Route("GET", _TENANT, _OWN, tenants.get_tenant, answer=cards.TenantCard),
    Route("GET", f"{_TENANT}/use", _OWN, tenants.get_use, answer=cards.TenantUse),
    Route("PATCH", _TENANT, _ADMIN, tenants.change_tenant, asked.ChangeTenantFields, answer=cards.TenantCard),
    Route("DELETE", _TENANT, _ADMIN, tenants.delete_tenant, answer=cards.DeletedTenant),
    Route("POST", f"{_TENANT}/keys", _OWN, tenants.create_key, asked.CreateKeyFields, answer=cards.KeyCard),
    Route("GET", f"{_TENANT}/keys", _OWN, tenants.list_keys, answer=cards.KeyList),
    Route("DELETE", f"{_TENANT}/keys/{{key}}", _OWN, tenants.revoke_key, answer=cards.KeyCard),
    Route("GET", "/admin/whoami", _KEY, tenants.whoami, is_probe=True, answer=cards.CallerCard),
    Route(
        "GET",
        "/admin/usage",
        _OWN,
        records.get_usage,
        query=asked.UsageQuery,
        answers=(JSON, "text/csv"),
        answer=cards.UsageTable,
    ),
    Route("GET", "/admin/audit", _OWN, records.get_audit, query=asked.AuditQuery, answer=cards.AuditPage),
    Route("GET", "/admin/engine", _ADMIN, engine.get_engine, answer=engine.EngineCard),
    Route("PUT", "/admin/engine", _ADMIN, engine.put_engine, asked.LimitFields, answer=engine.EngineCard),
    Route(
        "GET",
        "/admin/engine/stream",
        _OWN,
        console.stream_engine,
        query=asked.StreamQuery,
        answers=(EVENTS,),
        event=(frames.Hello, frames.Frame, frames.Bye),
    ),
    Route("GET", "/admin/engine/health", _ADMIN, engine.get_engine_health, answer=engine.EngineHealth),
    Route("GET", "/admin/fleet", _ADMIN, engine.get_fleet, query=asked.FleetQuery, answer=engine.Fleet),
)
