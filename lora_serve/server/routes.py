"""The table of all routes. Router, guards, audit log, /openapi.json and tests are made from it."""

from __future__ import annotations

from functools import partial

from aiohttp.typedefs import Handler
from pydantic import BaseModel

from lora_serve.console.live import frames
from lora_serve.core.request import Task
from lora_serve.server import console, models
from lora_serve.server.admin import (
    adapters,
    audit,
    engine,
    fleet,
    keys,
    registration,
    tenants,
    upload,
    usage,
    vllm_lora,
)
from lora_serve.server.anthropic.body import anthropic_error
from lora_serve.server.anthropic.request import count_tokens, create_message
from lora_serve.server.openai import tokens as tokenizer
from lora_serve.server.openai.chat import create_chat_completion
from lora_serve.server.openai.completions import create_completion
from lora_serve.server.openai.responses.request import create_response
from lora_serve.server.openai.tokens import generate_tokens
from lora_serve.server.operation import health, metrics, openapi
from lora_serve.server.pooling import embeddings, scores
from lora_serve.server.route import EVENTS, JSON, Access, AnswerKind, Route, RouteTable
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
from lora_serve.server.schemas.answers import adapters as adapter_cards
from lora_serve.server.schemas.answers import admin as cards
from lora_serve.server.schemas.answers import generation as generated
from lora_serve.server.schemas.answers import responses as response_answers
from lora_serve.server.schemas.answers import tenancy
from lora_serve.server.schemas.generation import ChatFields, CompletionFields
from lora_serve.server.schemas.messages import CountTokensFields, MessageFields
from lora_serve.server.schemas.pooling import ClassifyFields, EmbeddingFields, RerankFields, ScoreFields
from lora_serve.server.schemas.queries import (
    AdaptersQuery,
    AuditQuery,
    DeletionQuery,
    FleetQuery,
    PageQuery,
    StreamQuery,
    UploadFields,
    UsageQuery,
)
from lora_serve.server.schemas.responses import ResponseFields
from lora_serve.server.schemas.tokenize import DetokenizeFields, GenerateFields, TokenizeChatFields, TokenizeTextFields

_PUBLIC, _KEY, _MODELS, _INFERENCE = Access.PUBLIC, Access.ANY_KEY, Access.MODELS, Access.INFERENCE
_OWN, _ADMIN = Access.TENANT_ADMIN, Access.ADMIN
_STREAMED, _EVENTS, _TEXT, _PAGE = (JSON, EVENTS), (EVENTS,), ("text/plain",), ("text/html",)
_FILES = ("text/javascript", "text/css", "image/svg+xml")
_GENERATE, _EMBED, _CLASSIFY, _COMPARE = (Task.GENERATE,), (Task.EMBED,), (Task.CLASSIFY,), (Task.CLASSIFY, Task.EMBED)
_ADAPTER, _ALIAS, _TENANT = "/admin/adapters/{id}", "/admin/aliases/{id}", "/admin/tenants/{tenant}"
_generation = partial(Route, "POST", answers=_STREAMED, tasks=_GENERATE)


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
        _INFERENCE,
        create_completion,
        CompletionFields,
        answer=generated.Completion,
        event=generated.CompletionChunk,
    ),
    _generation(
        "/v1/chat/completions",
        _INFERENCE,
        create_chat_completion,
        ChatFields,
        answer=generated.ChatCompletion,
        event=generated.ChatChunk,
    ),
    _generation(
        "/v1/responses",
        _INFERENCE,
        create_response,
        ResponseFields,
        answer=response_answers.Response,
        event=(response_answers.ResponseEvent, response_answers.ResponseError),
    ),
    _generation(
        "/inference/v1/generate",
        _INFERENCE,
        generate_tokens,
        GenerateFields,
        answer=generated.GeneratedTokens,
        event=generated.TokensChunk,
    ),
    _generation(
        "/v1/messages",
        _INFERENCE,
        create_message,
        MessageFields,
        answer=response_answers.AnthropicMessage,
        event=(response_answers.MessageEvent, response_answers.AnthropicError),
        refusal=anthropic_error,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        _MODELS,
        count_tokens,
        CountTokensFields,
        tasks=_GENERATE,
        answer=response_answers.TokenCount,
        refusal=anthropic_error,
    ),
    _pooled("/v1/embeddings", embeddings.create_embedding, EmbeddingFields, embeddings.Embeddings, _EMBED),
    *(
        _pooled(path, scores.create_classification, ClassifyFields, scores.Labels, _CLASSIFY)
        for path in ("/classify", "/v1/classify")
    ),
    *(_pooled(path, scores.create_score, ScoreFields, scores.Scores, _COMPARE) for path in ("/score", "/v1/score")),
    *(
        _pooled(path, scores.create_rerank, RerankFields, scores.Ranking, _COMPARE)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    Route("GET", "/v1/models", _MODELS, models.list_models, answer=generated.ModelList),
    Route("GET", "/v1/models/{id}", _MODELS, models.get_model, answer=generated.ModelCard),
    Route("DELETE", "/v1/models/{id}", _OWN, models.delete_model, answer=generated.DeletedModel),
    Route(
        "POST",
        "/tokenize",
        _MODELS,
        tokenizer.tokenize,
        (TokenizeTextFields, TokenizeChatFields),
        answer=generated.Tokens,
    ),
    Route("POST", "/detokenize", _MODELS, tokenizer.detokenize, DetokenizeFields, answer=generated.Text),
    Route("GET", "/tokenizer_info", _MODELS, tokenizer.tokenizer_info, answer=generated.TokenizerInfo),
    Route(
        "POST", "/admin/adapters", _OWN, registration.register_adapter, RegisterFields, answer=adapter_cards.AdapterCard
    ),
    Route(
        "GET",
        "/admin/adapters",
        _OWN,
        adapters.list_adapters,
        query=AdaptersQuery,
        answer=(adapter_cards.AdapterPage, adapter_cards.RowPage),
    ),
    Route("GET", "/admin/registrations", _OWN, registration.list_registrations, answer=adapter_cards.RegistrationList),
    Route("POST", f"{_ADAPTER}/pin", _OWN, adapters.pin, answer=adapter_cards.AdapterCard),
    Route("POST", f"{_ADAPTER}/unpin", _OWN, adapters.unpin, answer=adapter_cards.AdapterCard),
    Route("POST", f"{_ADAPTER}/prefetch", _ADMIN, adapters.prefetch, answer=adapter_cards.AdapterCard),
    Route("POST", f"{_ADAPTER}/evict", _ADMIN, adapters.evict, answer=adapter_cards.AdapterCard),
    Route("PUT", f"{_ADAPTER}/route", _OWN, adapters.set_route, RouteFields, answer=adapter_cards.AdapterCard),
    Route("POST", f"{_ADAPTER}/rollback", _OWN, adapters.roll_back, answer=adapter_cards.AdapterCard),
    Route("PUT", f"{_ADAPTER}/sharing", _ADMIN, adapters.set_sharing, SharingFields, answer=adapter_cards.AdapterCard),
    Route("PUT", _ADAPTER, _OWN, upload.upload_adapter, upload.BODY, UploadFields, answer=adapter_cards.AdapterCard),
    Route("GET", _ADAPTER, _OWN, adapters.get_adapter, answer=adapter_cards.AdapterCard),
    Route("PATCH", _ADAPTER, _OWN, registration.set_metadata, MetadataFields, answer=adapter_cards.AdapterCard),
    Route("DELETE", _ADAPTER, _OWN, adapters.delete_adapter, query=DeletionQuery, answer=adapter_cards.DeletedAdapter),
    Route("GET", "/admin/aliases", _ADMIN, adapters.list_aliases, answer=adapter_cards.AliasList),
    Route("PUT", _ALIAS, _ADMIN, adapters.set_alias, AliasFields, answer=adapter_cards.Alias),
    Route("DELETE", _ALIAS, _ADMIN, adapters.remove_alias, answer=adapter_cards.DeletedAlias),
    Route("POST", "/v1/load_lora_adapter", _ADMIN, vllm_lora.load_lora_adapter, LoadLoraFields, answers=_TEXT),
    Route("POST", "/v1/unload_lora_adapter", _ADMIN, vllm_lora.unload_lora_adapter, UnloadLoraFields, answers=_TEXT),
    Route("POST", "/admin/tenants", _ADMIN, tenants.create_tenant, CreateTenantFields, answer=tenancy.TenantCard),
    Route("GET", "/admin/tenants", _OWN, tenants.list_tenants, query=PageQuery, answer=tenancy.TenantPage),
    Route("GET", _TENANT, _OWN, tenants.get_tenant, answer=tenancy.TenantCard),
    Route("GET", f"{_TENANT}/use", _OWN, tenants.get_use, answer=tenancy.TenantUse),
    Route("PATCH", _TENANT, _ADMIN, tenants.change_tenant, ChangeTenantFields, answer=tenancy.TenantCard),
    Route("DELETE", _TENANT, _ADMIN, tenants.delete_tenant, answer=tenancy.DeletedTenant),
    Route("POST", f"{_TENANT}/keys", _OWN, keys.create_key, CreateKeyFields, answer=tenancy.KeyCard),
    Route("GET", f"{_TENANT}/keys", _OWN, keys.list_keys, answer=tenancy.KeyList),
    Route("DELETE", f"{_TENANT}/keys/{{key}}", _OWN, keys.revoke_key, answer=tenancy.KeyCard),
    Route("GET", "/admin/whoami", _KEY, tenants.whoami, is_probe=True, answer=tenancy.CallerCard),
    Route(
        "GET",
        "/admin/usage",
        _OWN,
        usage.get_usage,
        query=UsageQuery,
        answers=(JSON, "text/csv"),
        answer=tenancy.UsageTable,
    ),
    Route("GET", "/admin/audit", _OWN, audit.get_audit, query=AuditQuery, answer=tenancy.AuditPage),
    Route("GET", "/admin/engine", _ADMIN, engine.get_engine, answer=cards.EngineCard),
    Route("PUT", "/admin/engine", _ADMIN, engine.put_engine, LimitFields, answer=cards.EngineCard),
    Route(
        "GET",
        "/admin/engine/stream",
        _OWN,
        console.stream_engine,
        query=StreamQuery,
        answers=_EVENTS,
        event=(frames.Hello, frames.Frame, frames.Bye),
    ),
    Route("GET", "/admin/engine/health", _ADMIN, engine.get_engine_health, answer=cards.EngineHealth),
    Route("GET", "/admin/fleet", _ADMIN, fleet.get_fleet, query=FleetQuery, answer=cards.Fleet),
)
