"""The table of all routes. Router, guards, audit log, /openapi.json and tests are made from it."""

from __future__ import annotations

from lora_serve.core.request import Task
from lora_serve.server import models
from lora_serve.server import tokenize as tokenizer
from lora_serve.server.admin import (
    adapters,
    audit,
    engine,
    keys,
    metadata,
    registration,
    residency,
    routing,
    tenants,
    upload,
    usage,
    vllm_lora,
)
from lora_serve.server.openai.chat import create_chat_completion
from lora_serve.server.openai.completions import create_completion
from lora_serve.server.operation import docs_page, health, metrics, openapi
from lora_serve.server.pooling.classify import create_classification
from lora_serve.server.pooling.embeddings import create_embedding
from lora_serve.server.pooling.scores import create_rerank, create_score
from lora_serve.server.route import JSON, Access, Route, RouteTable
from lora_serve.server.schemas.admin import (
    AliasFields,
    ChangeTenantFields,
    CreateKeyFields,
    CreateTenantFields,
    LimitFields,
    LoadLoraFields,
    MetadataFields,
    RegisterFields,
    RouteFields,
    SharingFields,
    UnloadLoraFields,
)
from lora_serve.server.schemas.generation import ChatFields, CompletionFields
from lora_serve.server.schemas.pooling import ClassifyFields, EmbeddingFields, RerankFields, ScoreFields
from lora_serve.server.schemas.queries import (
    AdaptersQuery,
    AuditQuery,
    DeletionQuery,
    PageQuery,
    UploadFields,
    UsageQuery,
)
from lora_serve.server.schemas.tokenize import DetokenizeFields, TokenizeChatFields, TokenizeTextFields

_PUBLIC, _KEY, _MODELS, _INFERENCE = Access.PUBLIC, Access.ANY_KEY, Access.MODELS, Access.INFERENCE
_OWN, _ADMIN = Access.TENANT_ADMIN, Access.ADMIN
_STREAMED, _TEXT, _PAGE = (JSON, "text/event-stream"), ("text/plain",), ("text/html",)
_GENERATE, _EMBED, _CLASSIFY, _COMPARE = (Task.GENERATE,), (Task.EMBED,), (Task.CLASSIFY,), (Task.CLASSIFY, Task.EMBED)
_ADAPTER, _ALIAS, _TENANT = "/admin/adapters/{id}", "/admin/aliases/{id}", "/admin/tenants/{tenant}"

# The first route that fits is taken. An id may hold slashes, so the routes with a verb behind the id come first.
TABLE = RouteTable(
    Route("GET", "/health", _PUBLIC, health.get_health, is_probe=True),
    Route("GET", "/ping", _PUBLIC, health.get_health, is_probe=True),
    Route("POST", "/ping", _PUBLIC, health.get_health, is_probe=True),
    Route("GET", "/ready", _PUBLIC, health.get_ready, is_probe=True),
    Route("GET", "/metrics", _PUBLIC, metrics.get_metrics, answers=_TEXT, is_probe=True),
    Route("GET", "/version", _PUBLIC, health.get_version),
    Route("GET", "/openapi.json", _PUBLIC, openapi.get_openapi),
    Route("GET", "/docs", _PUBLIC, docs_page.get_docs, answers=_PAGE),
    Route(
        "POST", "/v1/completions", _INFERENCE, create_completion, CompletionFields, answers=_STREAMED, tasks=_GENERATE
    ),
    Route(
        "POST",
        "/v1/chat/completions",
        _INFERENCE,
        create_chat_completion,
        ChatFields,
        answers=_STREAMED,
        tasks=_GENERATE,
    ),
    Route("POST", "/v1/embeddings", _INFERENCE, create_embedding, EmbeddingFields, tasks=_EMBED),
    Route("POST", "/classify", _INFERENCE, create_classification, ClassifyFields, tasks=_CLASSIFY),
    Route("POST", "/v1/classify", _INFERENCE, create_classification, ClassifyFields, tasks=_CLASSIFY),
    Route("POST", "/score", _INFERENCE, create_score, ScoreFields, tasks=_COMPARE),
    Route("POST", "/v1/score", _INFERENCE, create_score, ScoreFields, tasks=_COMPARE),
    Route("POST", "/rerank", _INFERENCE, create_rerank, RerankFields, tasks=_COMPARE),
    Route("POST", "/v1/rerank", _INFERENCE, create_rerank, RerankFields, tasks=_COMPARE),
    Route("POST", "/v2/rerank", _INFERENCE, create_rerank, RerankFields, tasks=_COMPARE),
    Route("GET", "/v1/models", _MODELS, models.list_models),
    Route("GET", "/v1/models/{id}", _MODELS, models.get_model),
    Route("DELETE", "/v1/models/{id}", _OWN, models.delete_model),
    Route("POST", "/tokenize", _MODELS, tokenizer.tokenize, (TokenizeTextFields, TokenizeChatFields)),
    Route("POST", "/detokenize", _MODELS, tokenizer.detokenize, DetokenizeFields),
    Route("GET", "/tokenizer_info", _MODELS, tokenizer.tokenizer_info),
    Route("POST", "/admin/adapters", _OWN, registration.register_adapter, RegisterFields),
    Route("GET", "/admin/adapters", _OWN, adapters.list_adapters, query=AdaptersQuery),
    Route("POST", f"{_ADAPTER}/pin", _OWN, residency.pin),
    Route("POST", f"{_ADAPTER}/unpin", _OWN, residency.unpin),
    Route("POST", f"{_ADAPTER}/prefetch", _ADMIN, residency.prefetch),
    Route("POST", f"{_ADAPTER}/evict", _ADMIN, residency.evict),
    Route("PUT", f"{_ADAPTER}/route", _OWN, routing.set_route, RouteFields),
    Route("POST", f"{_ADAPTER}/rollback", _OWN, routing.roll_back),
    Route("PUT", f"{_ADAPTER}/sharing", _ADMIN, adapters.set_sharing, SharingFields),
    Route("PUT", _ADAPTER, _OWN, upload.upload_adapter, upload.BODY, UploadFields),
    Route("GET", _ADAPTER, _OWN, adapters.get_adapter),
    Route("PATCH", _ADAPTER, _OWN, metadata.set_metadata, MetadataFields),
    Route("DELETE", _ADAPTER, _OWN, adapters.delete_adapter, query=DeletionQuery),
    Route("GET", "/admin/aliases", _ADMIN, routing.list_aliases),
    Route("PUT", _ALIAS, _ADMIN, routing.set_alias, AliasFields),
    Route("DELETE", _ALIAS, _ADMIN, routing.remove_alias),
    Route("POST", "/v1/load_lora_adapter", _ADMIN, vllm_lora.load_lora_adapter, LoadLoraFields, answers=_TEXT),
    Route("POST", "/v1/unload_lora_adapter", _ADMIN, vllm_lora.unload_lora_adapter, UnloadLoraFields, answers=_TEXT),
    Route("POST", "/admin/tenants", _ADMIN, tenants.create_tenant, CreateTenantFields),
    Route("GET", "/admin/tenants", _OWN, tenants.list_tenants, query=PageQuery),
    Route("GET", _TENANT, _OWN, tenants.get_tenant),
    Route("PATCH", _TENANT, _ADMIN, tenants.change_tenant, ChangeTenantFields),
    Route("DELETE", _TENANT, _ADMIN, tenants.delete_tenant),
    Route("POST", f"{_TENANT}/keys", _OWN, keys.create_key, CreateKeyFields),
    Route("GET", f"{_TENANT}/keys", _OWN, keys.list_keys),
    Route("DELETE", f"{_TENANT}/keys/{{key}}", _OWN, keys.revoke_key),
    Route("GET", "/admin/whoami", _KEY, tenants.whoami),
    Route("GET", "/admin/usage", _OWN, usage.get_usage, query=UsageQuery, answers=(JSON, "text/csv")),
    Route("GET", "/admin/audit", _OWN, audit.get_audit, query=AuditQuery),
    Route("GET", "/admin/engine", _ADMIN, engine.get_engine),
    Route("PUT", "/admin/engine", _ADMIN, engine.put_engine, LimitFields),
)
