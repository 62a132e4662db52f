"""The table of vLLM's flags (`vllm serve --help=all`, releases 0.6 to 0.11). Flags whose names are settings of this
server mean the same and are not in it.
"""

from __future__ import annotations

from lora_serve.core.vllm.flag import Fate, Takes, VllmFlag
from lora_serve.core.vllm.speculation import ignored_in_speculative_config, read_speculative_config

_ONE_DEVICE = "this server runs on one device"
_ALWAYS = "always on"
_TEXT_ONLY = "this server takes text only"
_LOGS = "the log has its own form (--log-format)"
_COMPILES = "nothing is compiled here (--cuda-graphs)"
_BACKEND = "there is one backend, llguidance"
_SPECULATION = "tokens are guessed without a second model (--speculate)"
_PER_REQUEST = "a request asks for it by its own field"
_CHECKPOINT = "a checkpoint is served as it is"


def _meant(name: str, setting: str, why: str = "", **more: object) -> VllmFlag:
    return VllmFlag(name, Fate.MEANT, why, setting=setting, **more)  # type: ignore[arg-type]


def _ignored(name: str, why: str, takes: Takes = Takes.ONE, **more: object) -> VllmFlag:
    return VllmFlag(name, Fate.IGNORED, why, takes, **more)  # type: ignore[arg-type]


def _refused(
    name: str, why: str, *harmless: str, takes: Takes = Takes.ONE, short: str = "", instead: str = ""
) -> VllmFlag:
    return VllmFlag(name, Fate.REFUSED, why, takes, short, harmless, instead)


_SWITCH, _MANY = Takes.SWITCH, Takes.MANY

_MEANT = (
    _meant("--scheduling-policy", "--policy"),
    _meant(
        "--enforce-eager",
        "--cuda-graphs",
        "--enforce-eager is --no-cuda-graphs",
        takes=_SWITCH,
        values={"on": "off", "off": "on"},
    ),
    _meant("--kv-cache-memory-bytes", "--kv-cache-memory"),
    _meant(
        "--speculative-config",
        "--speculate",
        "the method `ngram` with its `num_speculative_tokens`; other methods are refused",
        short="-sc",
        read=read_speculative_config,
        ignored=ignored_in_speculative_config,
    ),
    _meant(
        "--runner", "--task", "for `pooling` give --task embed or classify", values={"auto": "", "generate": "generate"}
    ),
    _meant(
        "--convert",
        "--task",
        "for rewards there is nothing here",
        values={"auto": "", "none": "", "embed": "embed", "classify": "classify"},
    ),
)

_IGNORED = (
    # The server.
    _ignored("--enable-lora", _ALWAYS, _SWITCH),
    _ignored("--uvicorn-log-level", _LOGS),
    _ignored("--disable-uvicorn-access-log", _LOGS, _SWITCH),
    _ignored("--disable-access-log-for-endpoints", "probes are logged only if their status changes"),
    _ignored("--disable-log-requests", "no prompt is ever logged", _SWITCH),
    _ignored("--enable-log-requests", "no prompt is ever logged", _SWITCH),
    _ignored("--enable-log-outputs", "no answer is ever logged", _SWITCH),
    _ignored("--enable-log-deltas", "no answer is ever logged", _SWITCH),
    _ignored("--max-log-len", "no prompt is ever logged"),
    _ignored("--log-config-file", _LOGS),
    _ignored("--log-error-stack", "a bug's traceback is always logged, never answered", _SWITCH),
    _ignored("--disable-log-stats", "figures are in /metrics", _SWITCH),
    _ignored("--aggregate-engine-logging", "there is one engine", _SWITCH),
    _ignored("--enable-request-id-headers", _ALWAYS, _SWITCH),
    _ignored("--enable-server-load-tracking", "GET /admin/engine tells the load", _SWITCH),
    _ignored("--enable-tokenizer-info-endpoint", _ALWAYS, _SWITCH),
    _ignored("--enable-prompt-tokens-details", _ALWAYS, _SWITCH),
    _ignored("--disable-frontend-multiprocessing", "--engine says where the engine runs", _SWITCH),
    _ignored("--disable-fastapi-docs", "/docs and /openapi.json tell nothing about this server's tenants", _SWITCH),
    _ignored("--enable-offline-docs", "/docs needs nothing from elsewhere", _SWITCH),
    _ignored("--allow-credentials", "keys are sent in a header, never in cookies", _SWITCH),
    _ignored("--allowed-methods", "origins in --allowed-origins may use all of them"),
    _ignored("--allowed-headers", "origins in --allowed-origins may send all of them"),
    _ignored("--enable-ssl-refresh", "SIGHUP reads a renewed certificate", _SWITCH),
    _ignored("--h11-max-incomplete-event-size", "--max-header-size, --max-body-size"),
    _ignored("--h11-max-header-count", "--max-header-size"),
    # Tools and structured output.
    _ignored("--enable-auto-tool-choice", _ALWAYS, _SWITCH),
    _ignored("--guided-decoding-backend", _BACKEND),
    _ignored("--guided-decoding-disable-fallback", _BACKEND, _SWITCH),
    _ignored("--guided-decoding-disable-any-whitespace", "a request's schema says it", _SWITCH),
    _ignored("--structured-outputs-config", _BACKEND),
    # LoRA.
    _ignored("--lora-extra-vocab-size", "added tokens are each adapter's own, in any number"),
    _ignored("--enable-lora-bias", "trained biases are always served", _SWITCH),
    _ignored("--fully-sharded-loras", _ONE_DEVICE, _SWITCH),
    _ignored("--max-prompt-adapters", "there are none without --enable-prompt-adapter"),
    _ignored("--max-prompt-adapter-token", "there are none without --enable-prompt-adapter"),
    # Scheduling and memory.
    _ignored("--enable-chunked-prefill", "always on; --max-num-batched-tokens is a chunk's size", _SWITCH),
    _ignored("--max-num-partial-prefills", "--max-num-batched-tokens is what prompts share"),
    _ignored("--max-long-partial-prefills", "--max-num-batched-tokens is what prompts share"),
    _ignored("--long-prefill-token-threshold", "--prompt-stretch bounds what long prompts cost others"),
    _ignored("--prefix-caching-hash-algo", "blocks are found by SHA-256 under a secret"),
    _ignored("--async-scheduling", "the engine schedules beside the step", _SWITCH),
    _ignored("--disable-async-output-proc", "the engine schedules beside the step", _SWITCH),
    _ignored("--stream-interval", "a token is sent when it is there"),
    _ignored("--num-lookahead-slots", "guessed tokens take blocks that are free (--speculate)"),
    _ignored("--num-scheduler-steps", "a step is one token of each row"),
    _ignored("--multi-step-stream-outputs", "a step is one token of each row", _SWITCH),
    _ignored("--scheduler-delay-factor", "--batch-wait-ms"),
    _ignored("--preemption-mode", "--swap-space decides it"),
    _ignored("--use-v2-block-manager", "there is one", _SWITCH),
    _ignored("--disable-hybrid-kv-cache-manager", "there is one", _SWITCH),
    _ignored("--calculate-kv-scales", "the KV cache is not quantised", _SWITCH),
    _ignored("--num-gpu-blocks-override", "--kv-cache-memory"),
    # Kernels.
    _ignored("--compilation-config", _COMPILES, short="-O"),
    _ignored("--cuda-graph-sizes", _COMPILES, _MANY),
    _ignored("--cudagraph-capture-sizes", _COMPILES, _MANY),
    _ignored("--max-cudagraph-capture-size", _COMPILES),
    _ignored("--max-seq-len-to-capture", _COMPILES),
    _ignored("--disable-cascade-attn", "--attention", _SWITCH),
    _ignored("--disable-custom-all-reduce", _ONE_DEVICE, _SWITCH),
    _ignored("--attention-backend", "--attention"),
    _ignored("--model-impl", "transformers' own modules are always served"),
    _ignored("--enable-flash-late-interaction", "there are no late-interaction models here", _SWITCH),
    # Processes and machines.
    _ignored("--distributed-executor-backend", _ONE_DEVICE),
    _ignored("--enable-expert-parallel", _ONE_DEVICE, _SWITCH),
    _ignored("--max-parallel-loading-workers", _ONE_DEVICE),
    _ignored("--ray-workers-use-nsight", _ONE_DEVICE, _SWITCH),
    _ignored("--tokenizer-pool-size", "tokenizers run beside the event loop"),
    _ignored("--tokenizer-pool-type", "tokenizers run beside the event loop"),
    _ignored("--safetensors-load-strategy", "weights are mapped, and read once"),
    _ignored("--use-tqdm-on-load", _LOGS, _SWITCH),
    # Figures.
    _ignored("--collect-detailed-traces", "traces have all there is to tell"),
    _ignored("--show-hidden-metrics-for-version", "no metric is hidden"),
    # Images and the like.
    _ignored("--limit-mm-per-prompt", _TEXT_ONLY),
    _ignored("--mm-processor-kwargs", _TEXT_ONLY),
    _ignored("--mm-processor-cache-gb", _TEXT_ONLY),
    _ignored("--disable-mm-preprocessor-cache", _TEXT_ONLY, _SWITCH),
    _ignored("--media-io-kwargs", _TEXT_ONLY),
    _ignored("--allowed-local-media-path", _TEXT_ONLY),
    _ignored("--allowed-media-domains", _TEXT_ONLY, _MANY),
    _ignored("--interleave-mm-strings", _TEXT_ONLY, _SWITCH),
    _ignored("--skip-mm-profiling", _TEXT_ONLY, _SWITCH),
)

_REFUSED = (
    # One device, one engine.
    _refused("--tensor-parallel-size", _ONE_DEVICE, "1", short="-tp"),
    _refused("--pipeline-parallel-size", _ONE_DEVICE, "1", short="-pp"),
    _refused(
        "--data-parallel-size",
        "engines side by side are a fleet (--engine ray)",
        "1",
        short="-dp",
        instead="--replicas",
    ),
    _refused("--decode-context-parallel-size", _ONE_DEVICE, "1", short="-dcp"),
    _refused("--api-server-count", "there is one process for HTTP", "1", short="-asc"),
    _refused("--nnodes", _ONE_DEVICE, "1"),
    _refused("--headless", _ONE_DEVICE, takes=_SWITCH),
    _refused("--cpu-offload-gb", "weights stay on the device", "0", "0.0"),
    _refused("--kv-transfer-config", "KV blocks stay in this server"),
    _refused("--kv-events-config", "KV blocks stay in this server"),
    # The model.
    _refused("--trust-remote-code", "no code of a checkpoint is ever run", takes=_SWITCH),
    _refused("--tokenizer", "the model's own tokenizer is used: put its files into the model's folder"),
    _refused("--tokenizer-mode", "the fast tokenizer is used", "auto", "hf"),
    _refused("--tokenizer-revision", "the model's own tokenizer is used"),
    _refused("--revision", "download that revision and give its folder"),
    _refused("--code-revision", "no code of a checkpoint is ever run"),
    _refused("--hf-config-path", _CHECKPOINT),
    _refused("--hf-overrides", _CHECKPOINT, "{}"),
    _refused("--rope-scaling", f"{_CHECKPOINT}: edit its config.json", "{}"),
    _refused("--rope-theta", f"{_CHECKPOINT}: edit its config.json"),
    _refused("--hf-token", "set the environment variable HF_TOKEN"),
    _refused("--download-dir", "set the environment variable HF_HOME"),
    _refused("--load-format", "only safetensors are read", "auto", "safetensors"),
    _refused("--config-format", "only Hugging Face's form is read", "auto", "hf"),
    _refused("--model-loader-extra-config", "only safetensors are read", "{}"),
    _refused("--kv-cache-dtype", "the KV cache has the model's own dtype", "auto"),
    _refused("--disable-sliding-window", _CHECKPOINT, takes=_SWITCH),
    _refused("--skip-tokenizer-init", "text needs a tokenizer", takes=_SWITCH),
    _refused("--generation-config", "defaults of sampling come with a request, or with an adapter's metadata", "vllm"),
    _refused(
        "--override-generation-config", "defaults of sampling come with a request, or with an adapter's metadata", "{}"
    ),
    _refused("--override-pooler-config", "--pooling", "{}"),
    _refused("--pooler-config", "--pooling", "{}"),
    _refused("--logits-processors", "no code from elsewhere is run", takes=_MANY),
    _refused("--logits-processor-pattern", "no code from elsewhere is run"),
    _refused("--logprobs-mode", "logprobs are those before bias and penalties", "raw_logprobs"),
    # LoRA.
    _refused("--lora-dtype", "an adapter is computed in the model's dtype", "auto"),
    _refused("--long-lora-scaling-factors", "adapters come with a scale of their own"),
    _refused("--default-mm-loras", _TEXT_ONLY),
    _refused("--enable-prompt-adapter", "adapters are LoRA's kind", takes=_SWITCH),
    # Speculation.
    _refused("--speculative-model", _SPECULATION),
    _refused("--num-speculative-tokens", _SPECULATION, "0", instead="--speculate"),
    # Requests and answers.
    _refused("--chat-template-content-format", "content is given to templates as text", "auto", "string"),
    _refused("--trust-request-chat-template", "a template in a request is never used", takes=_SWITCH),
    _refused("--default-chat-template-kwargs", _PER_REQUEST, "{}"),
    _refused("--response-role", "the role of an answer is assistant", "assistant"),
    _refused("--return-tokens-as-token-ids", _PER_REQUEST, takes=_SWITCH),
    _refused("--enable-force-include-usage", "a request asks for it (stream_options)", takes=_SWITCH),
    _refused(
        "--exclude-tools-when-tool-choice-none", "the template gets the tools that a request names", takes=_SWITCH
    ),
    _refused("--tool-parser-plugin", "no code from elsewhere is run", ""),
    _refused("--tool-server", "tools are the caller's", ""),
    _refused("--enable-sleep-mode", "there is no /sleep", takes=_SWITCH),
    _refused("--middleware", "no code from elsewhere is run"),
    _refused("--uds", "this server listens on TCP only"),
    _refused("--ssl-ciphers", "TLS 1.2 and newer, with the ciphers of OpenSSL's defaults"),
    _refused("--tokens-only", "text is always served", takes=_SWITCH),
)

FLAGS = (*_MEANT, *_IGNORED, *_REFUSED)
