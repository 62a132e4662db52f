"""Builds the parts of the web server from what is open."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lora_serve.adapters.checkpoint.chat_template import BaseTemplates, ChatTemplates
from lora_serve.adapters.checkpoint.own_tokens import BaseTokens
from lora_serve.adapters.registration.registry import Registry
from lora_serve.adapters.sources.table import SourceTable
from lora_serve.adapters.storage import AdapterStorage
from lora_serve.adapters.stores.files import StoreMonitor
from lora_serve.client.base import EngineClient
from lora_serve.core.config import AdapterConfig, ServerConfig
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.setting_groups.overflow import OverflowConfig
from lora_serve.core.settings import Settings
from lora_serve.engine_host.hosts import LoadedEngine
from lora_serve.server.background.caller_texts import NUM_PROCESSES, AdapterTemplates, GrammarChecks
from lora_serve.server.background.tasks import FairThreads, Staging
from lora_serve.server.lifecycle import Lifecycle
from lora_serve.server.overflow.decision import Overflow
from lora_serve.server.services import Services
from lora_serve.server.telemetry.metrics import Metrics
from lora_serve.server.telemetry.tracing import RequestTraces
from lora_serve.tenancy.accounting import Accounting
from lora_serve.tenancy.authentication.admin_key import AdminKey, load_admin_key
from lora_serve.tenancy.authentication.authenticator import Authenticator, KeyTable, auth_required
from lora_serve.text.adapter_template import TemplateProcesses, trial_faults
from lora_serve.text.tokenizer import TextModel


def build_services(
    settings: Settings,
    *,
    model: LoadedEngine,
    text: TextModel,
    storage: AdapterStorage,
    sources: SourceTable,
    keys: KeyTable,
    accounting: Accounting,
    traces: RequestTraces | None,
    use_one_core: Callable[[], None],
    monitor: StoreMonitor,
) -> Services:
    """The parts of the web server, joined. Raises ConfigError for an admin key that cannot be read or made."""
    config, adapter_config = settings.part(ServerConfig), settings.part(AdapterConfig)
    admin_key = load_admin_key(settings.admin_key, settings.store, monitor)
    monitor.start()  # after everything was opened: from now on it tries again what could not be opened for writing
    base_tokens = BaseTokens(text.vocabulary(), text.eos_token_ids)
    processes = TemplateProcesses(NUM_PROCESSES)
    templates = base_templates(text, model.spec, processes, adapter_config.adapter_chat_templates)
    registry = Registry(adapter_config, model.spec, storage.catalog, storage.store, base_tokens, templates)
    registry.sweep(seconds=0)  # what must come first; the reconciler goes on once the server is ready
    metrics = Metrics(settings.base_name, settings.metrics_tenants)
    return Services(
        client=model.client,
        catalog=storage.catalog,
        registry=registry,
        verifier=model.verifier,
        staging=Staging(sources, registry.new_folder, settings.max_upload_size),
        text=text,
        grammars=GrammarChecks(text, config),
        spec=model.spec,
        config=config,
        adapter_config=adapter_config,
        authenticator=Authenticator(
            admin_key,
            auth_required(settings.auth_mode, settings.host),
            keys,
            tuple(AdminKey.of(secret) for secret in settings.api_key),
        ),
        keys=keys,
        metrics=metrics,
        store=storage.store,
        store_monitor=monitor,
        traces=traces,
        lifecycle=Lifecycle(),
        registrations=FairThreads(
            "registry",
            settings.registration_threads,
            on_start=use_one_core,
            seconds_per_minute=settings.tenant_registration_seconds,
        ),
        quotas=accounting.quotas,
        meter=accounting.meter,
        overflow=overflow_of(settings.part(OverflowConfig), model.client, metrics, keys),
        audit=accounting.audit,
        templates=AdapterTemplates(processes),
    )


def overflow_of(config: OverflowConfig, client: EngineClient, metrics: Metrics, keys: KeyTable) -> Overflow | None:
    """The neighbours of --overflow; None if there are none."""
    if not config.neighbours:
        return None
    return Overflow(config, client, metrics.registry, keys.directory.may_leave)


def base_templates(text: TextModel, spec: ModelSpec, processes: TemplateProcesses, rule: str) -> BaseTemplates | None:
    """The base's chat template, with which adapters' own are compared; None for a model that has no chats."""
    if spec.pooling is not None:
        return None
    own = ChatTemplates(text.template.texts, text.template.special_tokens)

    def faults_in_chats(found: ChatTemplates) -> Mapping[str, str]:
        return trial_faults(processes, found.texts, {**own.special_tokens, **found.special_tokens})

    return BaseTemplates(
        own,
        processes.fault_in,
        faults_in_chats,
        is_token=lambda token: text.token_id(token) is not None,
        are_kept=rule != "off",
    )
