"""The table of vLLM's flags (`vllm serve --help=all`, releases 0.6 to 0.33). Flags whose names are settings of this
server mean the same and are not in it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lora_serve.core.setting_types import MAX_DRAFT
from lora_serve.core.strict_json import JsonError, parse_json


class Takes(enum.Enum):
    """The values behind a flag."""

    SWITCH = "none: --x or --no-x"
    ONE = "one"
    MANY = "one or more"


class Fate(enum.Enum):
    """The ends that a flag comes to."""

    MEANT = "does the same"  # under the name of a setting of ours
    IGNORED = "accepted, and means nothing here"
    REFUSED = "refused, as answers would change"


@dataclass(frozen=True, slots=True)
class VllmFlag:
    """A flag that is no setting of this server under the same name."""

    name: str
    fate: Fate
    why: str  # of MEANT: what is different, if anything
    takes: Takes = Takes.ONE
    short: str = ""
    harmless: tuple[str, ...] = ()  # values of a refused flag that say what is so here anyway
    setting: str = ""  # with MEANT: the flag of ours; with REFUSED: the one that takes the value instead
    also: tuple[str, ...] = ()  # with MEANT: more flags of ours that get the same value
    values: Mapping[str, str] = field(default_factory=dict)  # with MEANT: vLLM's value -> ours; empty: as it is
    read: Callable[[str], str] | None = None  # in place of `values`; raises ValueError in words
    ignored: Callable[[str], str] | None = None  # with MEANT: names what means nothing in a value, and why; else ""

    @property
    def dest(self) -> str:
        """The name of its value among parsed arguments, which no setting has."""
        return "vllm:" + self.name


_METHODS = ("ngram", "ngram_gpu")
_MEANS_NOTHING = {"prompt_lookup_max", "prompt_lookup_min"}  # the longest and the shortest match
_KNOWN = {"method", "num_speculative_tokens", "model", *_MEANS_NOTHING}


def read_speculative_config(text: str) -> str:
    """The value of --speculate. Raises ValueError for what is not done here."""
    try:
        config = parse_json(text.encode())
    except JsonError as error:
        raise ValueError(f"expected a JSON object ({error.reason})") from None
    if not isinstance(config, dict):
        raise ValueError("expected a JSON object")
    method = config.get("method", "ngram" if config.get("model") in _METHODS else None)
    if method not in _METHODS:
        raise ValueError(
            "tokens are guessed from prompt and earlier answers, without a second model:"
            ' give {"method": "ngram"}, or --speculate N'
        )
    if unknown := sorted(config.keys() - _KNOWN):
        raise ValueError(f"{', '.join(unknown)[:200]}: not known for the method ngram")
    return _count(config.get("num_speculative_tokens", "auto"))


def ignored_in_speculative_config(text: str) -> str:
    """The parts of what `read_speculative_config` took that mean nothing here, with the reason; else nothing."""
    found = sorted(_MEANS_NOTHING & parse_json(text.encode()).keys())
    return f"{', '.join(found)}: the lengths of matches that pay are learned" if found else ""


def _count(value: Any) -> str:
    if value != "auto" and not (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_DRAFT):
        raise ValueError(f"num_speculative_tokens is a number from 1 to {MAX_DRAFT}")
    return str(value)


_SPECULATION = "tokens are guessed without a second model (--speculate)"


def _meant(name: str, setting: str, why: str = "", **more: object) -> VllmFlag:
    return VllmFlag(name, Fate.MEANT, why, setting=setting, **more)  # type: ignore[arg-type]


def _flags(fate: Fate, table: str) -> Iterator[VllmFlag]:
    """The flags of a text like those below."""
    for reason, _, names in (line.rpartition(": ") for line in table.strip().replace("\n  ", " ").splitlines()):
        why, _, harmless = reason.rstrip("]").partition(" [")
        for name, _, short in (name.partition("/") for name in names.split()):
            takes = {"+": Takes.SWITCH, "*": Takes.MANY}.get(name[0], Takes.ONE)
            values = tuple("" if value == "-" else value for value in harmless.split())
            yield VllmFlag(name.lstrip("+*"), fate, why, takes, short, values)


def _refused(name: str, why: str, harmless: str, instead: str, short: str = "") -> VllmFlag:
    return VllmFlag(name, Fate.REFUSED, why, Takes.ONE, short, (harmless,), instead)


_MEANT = (
    _meant("--scheduling-policy", "--policy"),
    _meant(
        "--enforce-eager",
        "--cuda-graphs",
        "--enforce-eager is --no-cuda-graphs and --no-compile-layers",
        takes=Takes.SWITCH,
        also=("--compile-layers",),
        values={"on": "off", "off": "on"},
    ),
    _meant("--kv-cache-memory-bytes", "--kv-cache-memory"),
    _meant("--device-memory-utilization", "--gpu-memory-utilization"),
    _meant(
        "--speculative-config",
        "--speculate",
        "the method `ngram` with its `num_speculative_tokens`; other methods are refused",
        short="-sc",
        read=read_speculative_config,
        ignored=ignored_in_speculative_config,
    ),
    _meant(
        "--convert",
        "--task",
        "for rewards there is nothing here",
        values={"auto": "", "none": "", "embed": "embed", "classify": "classify"},
    ),
    _meant(
        "--runner",
        "--task",
        "--convert says which kind of pooling; drafts need no model of their own",
        values={"auto": "", "generate": "generate", "pooling": "pooling"},
    ),
    _meant("--max-num-queued-reqs", "--max-queue", "counts what waits, without what runs"),
    _meant("--max-num-queued-tokens", "--max-queue-tokens", "counts prompts that wait"),
)

# A reason and its flags: + marks a switch, * a list of values, /-n a short name, and [] harmless values (-: none).
_IGNORED = """
always on: +--enable-lora +--enable-request-id-headers +--enable-tokenizer-info-endpoint
  +--enable-prompt-tokens-details +--enable-auto-tool-choice
the log has its own form (--log-format): --uvicorn-log-level --log-config-file --log-level --logging-config
  +--disable-uvicorn-access-log +--use-tqdm-on-load +--enable-logging-iteration-details
probes are logged only if their status changes: --disable-access-log-for-endpoints
no prompt is ever logged: --max-log-len +--disable-log-requests +--enable-log-requests
no answer is ever logged: +--enable-log-outputs +--enable-log-deltas
a bug's traceback is always logged, never answered: +--log-error-stack
figures are in /metrics: --kv-cache-metrics-sample --custom-histogram-buckets --per-request-spec-decode-metrics
  +--disable-log-stats +--kv-cache-metrics +--cudagraph-metrics +--enable-mfu-metrics
the header Server-Timing tells a request's times: +--enable-per-request-metrics
there is one engine: +--aggregate-engine-logging
GET /admin/engine tells the load: +--enable-server-load-tracking
--engine says where the engine runs: +--disable-frontend-multiprocessing
/docs and /openapi.json tell nothing about this server's tenants: +--disable-fastapi-docs
/docs needs nothing from elsewhere: +--enable-offline-docs
keys are sent in a header, never in cookies: +--allow-credentials
origins in --allowed-origins may use all of them: --allowed-methods
origins in --allowed-origins may send all of them: --allowed-headers
SIGHUP reads a renewed certificate: +--enable-ssl-refresh
--max-header-size, --max-body-size: --h11-max-incomplete-event-size
--max-header-size: --h11-max-header-count
a stream sends nothing between two tokens: --sse-keep-alive-interval
answers name the versions that made them by headers: --fingerprint-mode --fingerprint-value
there is no /v2/chat of Cohere's: --cohere-format +--cohere-is-reasoning-model
variables of vLLM's are not read: +--fail-on-environ-validation
is for devices of other makers: --additional-config
there is one backend, llguidance: --guided-decoding-backend --structured-outputs-config
  +--guided-decoding-disable-fallback
/inference/v1/generate is always there: +--enable-scale-out
a request's schema says it: +--guided-decoding-disable-any-whitespace
added tokens are each adapter's own, in any number: --lora-extra-vocab-size
heads have labels in any number: --max-lora-cls-labels
trained biases are always served: +--enable-lora-bias
adapters of all forms share a batch: +--specialize-active-lora +--enable-mixed-moe-lora-format
  +--enable-moe-shared-loras
there are none without --enable-prompt-adapter: --max-prompt-adapters --max-prompt-adapter-token
always on; --max-num-batched-tokens is a chunk's size: +--enable-chunked-prefill
--max-num-batched-tokens is what prompts share: --max-num-partial-prefills --max-long-partial-prefills
  --max-num-scheduled-tokens --prefill-schedule-interval
--prompt-stretch bounds what long prompts cost others: --long-prefill-token-threshold
  +--long-prefill-token-threshold-adaptive
--max-num-seqs: --max-num-active-seqs
memory is estimated before a row starts: --watermark +--scheduler-reserve-full-isl
blocks are found by SHA-256 under a secret: --prefix-caching-hash-algo --prefix-match-unit
  --prefix-cache-retention-interval +--swa-bounded-replay
--launch-ahead decides it on GPUs: +--async-scheduling +--disable-async-output-proc
a token is sent when it is there: --stream-interval
guessed tokens take blocks that are free (--speculate): --num-lookahead-slots
a step is one token of each row: --num-scheduler-steps +--multi-step-stream-outputs
--batch-wait-ms: --scheduler-delay-factor
--swap-space decides it: --preemption-mode --kv-offloading-size --kv-offloading-backend
there is one: +--use-v2-block-manager +--disable-hybrid-kv-cache-manager
each token and head has a scale of its own: +--calculate-kv-scales
all layers' KV cache has one dtype: *--kv-cache-dtype-skip-layers
--kv-cache-memory: --num-gpu-blocks-override
weights stay on the device: --offload-backend --offload-num-in-group --offload-prefetch-step *--offload-params
  *--cpu-offload-params
--compile-layers and --cuda-graphs say it: --compilation-config/-O --max-cudagraph-capture-size
  --max-seq-len-to-capture --optimization-level --performance-mode --jit-monitor-mode +--jit-monitor-verbose
  *--cuda-graph-sizes *--cudagraph-capture-sizes
--attention: --attention-backend --attention-config/-ac +--disable-cascade-attn
this server has kernels of its own: --kernel-config --ir-op-priority --moe-backend --linear-backend
  --sparse-indexer-topk-backend --gdn-prefill-backend --kda-prefill-backend --kda-decode-backend
  +--enable-flashinfer-autotune +--monokernel +--kv-sharing-fast-prefill +--enable-cumem-allocator
numbers are drawn by a rule of this server's own: +--use-fp64-gumbel
transformers' own modules are always served: --model-impl
there are no late-interaction models here: +--enable-flash-late-interaction
models with a recurrent state are not served: --mamba-backend --mamba-ssu-algorithm --mamba-cache-philox-rounds
  --mamba-cache-dtype --mamba-ssm-cache-dtype --mamba-block-size --mamba-cache-mode --replayssm-buffer-len
  +--enable-mamba-cache-stochastic-rounding +--enable-mamba-shared-prefix-checkpoint +--use-replayssm
this server runs on one device: --distributed-executor-backend --max-parallel-loading-workers
  --distributed-timeout-seconds --master-addr --cpu-distributed-timeout-seconds --master-port --dcp-comm-backend
  --dcp-kv-cache-interleave-size --ubatch-size --cp-kv-cache-interleave-size --all2all-backend --eplb-config
  --expert-placement-strategy --dp-sync-interval --dbo-decode-token-threshold --dbo-prefill-token-threshold
  --elastic-ep-max-dp-size --fault-tolerance-config --data-parallel-address/-dpa --data-parallel-rpc-port/-dpp
  --data-parallel-backend/-dpb --data-parallel-supervisor-port --dp-supervisor-probe-interval-s
  --dp-supervisor-probe-timeout-s --dp-supervisor-probe-failure-threshold +--enable-expert-parallel
  +--fully-sharded-loras +--disable-custom-all-reduce +--ray-workers-use-nsight +--dcp-q-replicate +--enable-hc-sp
  +--enable-batch-sharded-sampling +--enable-ep-weight-filter +--enable-dbo +--enable-eplb +--enable-elastic-ep
  +--disable-nccl-for-dp-synchronization +--enable-nccl-comm-suspend +--enable-fault-tolerance
threads run where this process may: numactl: +--numa-bind *--numa-bind-nodes *--numa-bind-cpus
the server watches its engine: --watchdog-config
tokenizers run beside the event loop: --tokenizer-pool-size --tokenizer-pool-type --renderer-num-workers
weights are mapped, and read once: --safetensors-load-strategy --safetensors-prefetch-num-threads
  --safetensors-prefetch-block-size
only safetensors are read: --pt-load-map-location *--ignore-patterns
there is no /sleep: --sleep-mode-backend +--sleep-mode-offload-cudagraph *--sleep-preserve-parameter-names
traces have all there is to tell: --collect-detailed-traces --profiler-config +--enable-layerwise-nvtx-tracing
no metric is hidden: --show-hidden-metrics-for-version
this server takes text only: --limit-mm-per-prompt --mm-processor-kwargs --mm-processor-cache-gb --media-io-kwargs
  --mm-processor-device --allowed-local-media-path --mm-processor-cache-type --mm-hasher-algorithm
  --mm-shm-cache-max-object-size-mb --mm-encoder-tp-mode --mm-encoder-attn-backend --mm-encoder-attn-dtype
  --mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-path --mm-encoder-fp8-scale-save-margin --video-pruning-rate
  --mm-tensor-ipc --video-pruning-method --mm-ipc-gpu-memory-gb --ec-transfer-config --ec-manager-config
  +--disable-mm-preprocessor-cache +--interleave-mm-strings +--skip-mm-profiling +--language-model-only
  +--mm-device-do-normalize +--disable-chunked-mm-input +--enable-tower-connector-lora +--enable-mm-embeds
  +--trust-request-mm-kwargs +--enable-shm-tensor-arena *--allowed-media-domains
"""

_REFUSED = """
this server runs on one device [1]: --tensor-parallel-size/-tp --pipeline-parallel-size/-pp
  --decode-context-parallel-size/-dcp --nnodes --prefill-context-parallel-size/-pcp --data-parallel-size-local/-dpl
there is one process for HTTP [1]: --api-server-count/-asc
this server runs on one device [0]: --node-rank/-r --data-parallel-rank/-dpn --data-parallel-start-rank/-dpr
this server runs on one device: +--headless +--data-parallel-hybrid-lb/-dph +--data-parallel-external-lb/-dpe
  +--data-parallel-multi-port-external-lb/-dpm
set the environment variable CUDA_VISIBLE_DEVICES: --device-ids
weights stay on the device [0 0.0]: --cpu-offload-gb --offload-group-size
KV blocks stay in this server: --kv-transfer-config --kv-events-config
the base's weights stay as they are: --weight-transfer-config
no code of a checkpoint is ever run: +--trust-remote-code --code-revision
the model's own tokenizer is used: put its files into the model's folder: --tokenizer
the fast tokenizer is used [auto hf]: --tokenizer-mode
the model's own tokenizer is used: --tokenizer-revision
download that revision and give its folder: --revision
a checkpoint is served as it is: --hf-config-path --engram-config +--disable-sliding-window
  +--allow-deprecated-quantization
a checkpoint is served as it is [{}]: --hf-overrides --quantization-config --diffusion-config/-dc
a checkpoint is served as it is: edit its config.json [{}]: --rope-scaling
a checkpoint is served as it is: edit its config.json: --rope-theta
set the environment variable HF_TOKEN: --hf-token
set the environment variable HF_HOME: --download-dir
only safetensors are read [auto safetensors]: --load-format
only Hugging Face's form is read [auto hf]: --config-format
only safetensors are read [{}]: --model-loader-extra-config
text needs a tokenizer: +--skip-tokenizer-init
defaults of sampling come with a request, or with an adapter's metadata [vllm]: --generation-config
defaults of sampling come with a request, or with an adapter's metadata [{}]: --override-generation-config
--pooling [{}]: --override-pooler-config --pooler-config
no code from elsewhere is run: *--logits-processors --logits-processor-pattern --middleware --io-processor-plugin
no code from elsewhere is run [-]: --tool-parser-plugin --reasoning-parser-plugin --worker-extension-cls
no code from elsewhere is run [auto]: --worker-cls
no code from elsewhere is run [{}]: --model-class-overrides
no code from elsewhere is run: --policy: --scheduler-cls
logprobs are those before bias and penalties [raw_logprobs]: --logprobs-mode
an adapter is computed in the model's dtype [auto]: --lora-dtype
adapters come with a scale of their own: --long-lora-scaling-factors
this server takes text only: --default-mm-loras
adapters are LoRA's kind: +--enable-prompt-adapter
tokens are guessed without a second model (--speculate): --speculative-model --spec-model
tokens are guessed without a second model (--speculate) [ngram ngram_gpu]: --spec-method
content is given to templates as text [auto string]: --chat-template-content-format
a template in a request is never used: +--trust-request-chat-template
a request asks for it by its own field [{}]: --default-chat-template-kwargs --reasoning-effort-map
a request asks for it by its own field [auto none]: --anthropic-disabled-thinking-effort
each tool says it (`strict`) [auto]: --tool-strict-level
thinking has no budget of its own [{}]: --reasoning-config
answers are not watermarked: --watermark-config
answers hold tokens and log-probabilities alone [{}]: --aux-output-config
answers hold tokens and log-probabilities alone: +--enable-return-routed-experts +--return-sampling-mask
prompts are texts or token ids: +--enable-prompt-embeds
tokens are drawn, never dictated: +--enable-trace-replay
the role of an answer is assistant [assistant]: --response-role
a request asks for it by its own field: +--return-tokens-as-token-ids
a request asks for it (stream_options): +--enable-force-include-usage
the template gets the tools that a request names: +--exclude-tools-when-tool-choice-none
tools are the caller's [-]: --tool-server
there is no /sleep: +--enable-sleep-mode
this server listens on TCP only: --uds
TLS 1.2 and newer, with the ciphers of OpenSSL's defaults: --ssl-ciphers
text is always served: +--tokens-only +--mm-encoder-only
this server speaks HTTP: +--grpc --grpc-port
"""

FLAGS = (
    *_MEANT,
    *_flags(Fate.IGNORED, _IGNORED),
    *_flags(Fate.REFUSED, _REFUSED),
    _refused("--data-parallel-size", "engines side by side are a fleet (--engine ray)", "1", "--replicas", "-dp"),
    _refused("--num-speculative-tokens", _SPECULATION, "0", "--speculate"),
    _refused("--spec-tokens", _SPECULATION, "0", "--speculate"),
)
