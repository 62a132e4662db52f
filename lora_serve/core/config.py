"""The settings that a part of the program takes: groups of them (`setting_groups/`) together, frozen.

Values come from `Settings.part`, which has checked them; a part that is made by hand checks nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.core.errors import ModelError
from lora_serve.core.setting_groups.adapters import AdapterTierSettings, RegistrySettings
from lora_serve.core.setting_groups.engine import (
    BatchLimits,
    HostSettings,
    KernelSettings,
    KVCacheSettings,
    QueueLimits,
    SchedulingSettings,
)
from lora_serve.core.setting_groups.http import (
    AccessLimits,
    BrowserSettings,
    ConnectionLimits,
    GrammarConfig,
    RequestLimits,
    TenantSources,
    TlsConfig,
    UploadLimits,
)
from lora_serve.core.setting_groups.model import AddressSettings, ChatFormats, ModelForm, ModelSource
from lora_serve.core.setting_groups.operation import FleetSettings, MetricsSettings, SamplingSettings
from lora_serve.core.setting_types import part_of


@dataclass(frozen=True, kw_only=True)
class ModelConfig(KernelSettings, ModelForm, ModelSource):
    """The base model, its device, its form and its kernels."""

    def length(self, known: int) -> int:
        """Tokens of prompt and answer together, of a model that knows `known` positions. Raises ModelError."""
        if self.max_model_len is not None and self.max_model_len > known:
            raise ModelError(f"--max-model-len {self.max_model_len}: this model knows {known} positions at most")
        return self.max_model_len or known


@dataclass(frozen=True, kw_only=True)
class EngineConfig(SamplingSettings, GrammarConfig, SchedulingSettings, KVCacheSettings, QueueLimits, BatchLimits):
    """Batching limits, device memory and grammars."""

    @property
    def batch(self) -> BatchLimits:
        return part_of(self, BatchLimits)

    @property
    def queue(self) -> QueueLimits:
        return part_of(self, QueueLimits)


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(UploadLimits, TenantSources, RegistrySettings, AdapterTierSettings):
    """Where adapters are kept, and how many bytes each tier may hold."""

    base_name: str = ""  # the base model's name on the wire, beside its folder's


@dataclass(frozen=True, kw_only=True)
class ServerConfig(
    MetricsSettings,
    ConnectionLimits,
    TlsConfig,
    GrammarConfig,
    RequestLimits,
    BrowserSettings,
    AccessLimits,
    FleetSettings,
    HostSettings,
    ChatFormats,
    AddressSettings,
):
    """The HTTP side. It holds no key."""

    auth_mode: str = "auto"  # --auth as the other settings make it: "auto", "on" or "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """The engines on a Ray cluster (--engine ray), worked out from the settings and from the machine."""

    min_replicas: int  # engines; as many as the load needs, from here
    max_replicas: int  # to here
    num_gpus: float  # of each engine
    num_cpus: float  # likewise; the threads that it computes with
    address: str | None  # "auto" or HOST:PORT of a cluster to join; None: one of this server's own is started
    name: str  # of the application in the cluster
    wait: float  # seconds that a request waits while no engine is there
    router: str = "affinity"  # who chooses the engine of a request: a file of routing/routers/
