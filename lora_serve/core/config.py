"""Frozen slices of the settings (settings.py): each part of the program gets the one that it needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lora_serve.core.errors import ModelError
from lora_serve.core.tenant import Role
from lora_serve.core.web_origin import Origin

MAX_REGISTRATIONS = 16  # at once


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The base model, its device and its form."""

    model: str
    device: str  # "auto", "cpu" or "cuda"
    dtype: str  # "auto", "bfloat16", "float16" or "float32"
    max_model_len: int | None  # tokens; None: the model's own limit
    attention: str  # name of a file in model/attention, or "auto"
    lora_kernel: str  # name of a file in model/lora/kernels, or "auto"
    quantization: str  # "none": as the checkpoint is; "int8", "int4": weights are quantised at load
    task: str = "auto"  # "auto", "pooling": as the checkpoint says, or a value of `Task`
    pooling: str = "auto"  # "auto": as the checkpoint says, or "cls", "mean", "last"
    fuse_layers: bool = True  # replace layers by fused kernels where they prove to compute the same
    cuda_graphs: bool = True  # capture decode steps, on devices that can

    def length(self, known: int) -> int:
        """Tokens of prompt and answer together, of a model that knows `known` positions. Raises ModelError."""
        if self.max_model_len is not None and self.max_model_len > known:
            raise ModelError(f"--max-model-len {self.max_model_len}: this model knows {known} positions at most")
        return self.max_model_len or known


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of a batch's start and size, which may be changed while the server runs. Times are seconds."""

    max_num_seqs: int
    max_num_batched_tokens: int
    batch_wait: float = 0.0  # from the first waiting request; 0: a batch never waits
    preferred_batch_size: int | None = None  # waiting requests that end the wait
    ttft_target: float | None = None  # of the p95 of time to first token; None: nothing is adapted
    itl_target: float | None = None  # likewise of inter-token time
    prompt_stretch: float | None = None  # a step with prompts beside one of decode rows alone; None: any size


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The most that may wait before requests are refused; None: as many as the other limits allow."""

    max_requests: int
    max_tokens: int | None = None  # prompt tokens
    max_tenant_requests: int | None = None
    max_tenant_tokens: int | None = None

    def times(self, count: int) -> QueueLimits:
        """The limits of so many engines together."""
        return QueueLimits(
            self.max_requests * count,
            *(
                None if limit is None else limit * count
                for limit in (self.max_tokens, self.max_tenant_requests, self.max_tenant_tokens)
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarConfig:
    """The most that the schema, regex or grammar of one request may be and cause; see the settings of these names."""

    max_grammar_size: int = 2**17
    max_regex_size: int = 2**14
    max_grammar_symbols: int = 500_000
    max_grammar_items: int = 50_000
    max_lexer_states: int = 100_000
    max_lexer_work: int = 1_000_000
    grammar_threads: int = 2
    grammar_cache: int = 2**25


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Batching limits and device memory."""

    batch: BatchLimits
    queue: QueueLimits
    kv_cache_memory: int | None  # bytes; None: chosen from free memory
    block_size: int  # tokens per KV block
    enable_prefix_caching: bool
    policy: str  # name of a file in engine/policies
    seed: int
    max_wait: float = 10.0  # seconds after which no policy lets anybody overtake a request
    tenant_weights: tuple[tuple[str, float], ...] = ()  # shares of the fair policy; 1 for whoever is not named
    swap_space: int | None = None  # bytes of host memory for the KV blocks of preempted sequences; None: by device
    share_base_prefixes: bool = False  # tenants find one another's KV blocks of the base model alone
    memory_limit: int | None = None  # bytes of the device for all that is ours; None: what is free at start
    grammars: GrammarConfig = GrammarConfig()
    gpu_memory_utilization: float | None = None  # likewise, as a part of a GPU's memory
    speculate: str = "auto"  # "auto", "off", or the most tokens of a row and step that may be guessed


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """Where adapters are kept, and how many bytes each tier may hold."""

    store: Path
    roots: tuple[Path, ...] = ()
    redis_url: str | None = None
    redis_prefix: str = "lora_serve"  # of every key
    max_loras: int  # device slots
    max_lora_rank: int
    device_bytes: int | None = None  # None: no limit but max_loras
    host_bytes: int
    max_cpu_loras: int | None = None  # None: no limit but host_bytes
    disk_bytes: int | None = None  # None: no limit
    max_upload_bytes: int
    base_name: str = ""  # the base model's name on the wire, beside its folder's
    eviction: str = "cost"  # name of a file in adapters/eviction
    tenant_floor: float = 0.5  # part of a tenant's equal share of a tier that others cannot push out
    load_threads: int = 2
    load_timeout: float = 60.0  # seconds after which a load hangs
    urls: tuple[str, ...] = ()  # beginnings of http(s) URLs that may be registered
    allow_inner_urls: bool = False  # their hosts' names may mean private addresses and this machine
    tenant_sources: tuple[str, ...] = ()  # schemes of the sources from which tenants' own admins may register
    unnamed_days: float = 30.0  # that a blob which no catalog knows is kept aside; 0: for ever
    registration_seconds: float = 300.0  # of the processor, for the validation of one adapter
    chat_templates: str = "admin"  # whose adapters' own chat templates are used: "admin", "tenant" or "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The most that one inference request may ask for; the settings of the same names describe each."""

    max_n: int = 16
    max_prompts: int = 64
    max_logprobs: int = 20
    max_stop: int = 16
    max_stop_length: int = 1024  # characters
    max_stop_token_ids: int = 256
    max_logit_bias: int = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The most connections, and the longest waits for each. Times are seconds."""

    max_connections: int = 4096
    max_header_size: int = 8190  # of the request line, and of one header
    keep_alive_timeout: float = 75.0  # without a whole request head
    body_timeout: float = 120.0  # for a body; for each 4 KiB of an upload
    write_timeout: float = 60.0  # without a byte of the answer taken


@dataclass(frozen=True, slots=True)
class BrowserRules:
    """Hosts and origins whose pages may make a browser use this server."""

    hosts: frozenset[str] = frozenset()  # other names of a server that asks for no key
    origins: frozenset[Origin] = frozenset()  # whose pages may


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLimits:
    """The most attempts within a minute; 0: any number."""

    wrong_keys_per_minute: int = 20  # by one address
    admin_acts_per_minute: int = 1200  # by one key of the role admin
    tenant_acts_per_minute: int = 300  # by one key of a tenant's own admin

    def acts_of(self, role: Role) -> int:
        return self.admin_acts_per_minute if role is Role.ADMIN else self.tenant_acts_per_minute


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """PEM files of the server's certificate, and of those that its clients may show."""

    ssl_certfile: Path  # with its chain
    ssl_keyfile: Path | None  # None: in `ssl_certfile`
    ssl_ca_certs: Path | None  # who signs clients' certificates
    ssl_cert_reqs: int  # as in ssl.CERT_NONE (0), CERT_OPTIONAL (1), CERT_REQUIRED (2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP side."""

    host: str
    served_model_name: str
    other_names: frozenset[str] = frozenset()  # they mean the base model too, unless an adapter has such an id
    auth: str  # "auto", "on" or "off"
    max_body_bytes: int
    tls: TlsConfig | None = None  # None: plain HTTP
    metrics_names: str = "auto"  # "auto", "open" or "admin"
    engine: str = "thread"  # where it runs: "thread", "process" or "ray"
    router: str = "affinity"  # of a fleet: who chooses a request's engine
    requests: RequestLimits = RequestLimits()
    grammars: GrammarConfig = GrammarConfig()
    connections: ConnectionLimits = ConnectionLimits()
    browsers: BrowserRules = BrowserRules()
    attempts: AttemptLimits = AttemptLimits()
    tool_call_parser: str = "auto"  # the settings of the same names describe both
    reasoning_parser: str = "auto"
    ui: bool | None = None  # None: the console is there where `host` is loopback
    root_path: str = ""  # a prefix of paths, such as `/llm`; with it and without they mean the same


@dataclass(frozen=True, slots=True, kw_only=True)
class OverflowConfig:
    """The neighbours that compute what would wait here for long. Times are seconds."""

    neighbours: tuple[tuple[str, str], ...]  # name and URL; none: nothing leaves
    after: float = 1.0  # of predicted wait
    timeout: float = 10.0  # for the first token there, at most
    gap: float = 10.0  # between two tokens there, at most
    whole: float = 600.0  # for the whole answer there, at most
    model_map: tuple[tuple[str, str], ...] = ()  # see `ModelMap`
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountingConfig:
    """The counting of tenants' limits and usage."""

    flush_seconds: float = 1.0  # between two writes of usage
    bucket_seconds: int = 3600  # that one row of usage covers
    keep_days: int = 400
    counts_alone: bool = True  # limits per minute are counted by each server while Redis is away


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """The engines on a Ray cluster (--engine ray)."""

    min_replicas: int  # engines; as many as the load needs, from here
    max_replicas: int  # to here
    num_gpus: float  # of each engine
    num_cpus: float  # likewise; the threads that it computes with
    address: str | None  # "auto" or HOST:PORT of a cluster to join; None: one of this server's own is started
    name: str  # of the application in the cluster
    wait: float  # seconds that a request waits while no engine is there
    router: str = "affinity"  # who chooses the engine of a request: a file of routing/routers/
