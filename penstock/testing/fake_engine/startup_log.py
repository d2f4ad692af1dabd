"""The fake engine's log: vLLM 0.32.0's lines in vLLM's order, with the waits between them. Pure.

From the recording in tests/golden/vllm-0.32.0. vLLM logs to stdout; progress bars, uvicorn, tracebacks go to stderr.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from penstock.testing.fake_engine.options import Options, Refusal
from penstock.testing.fake_engine.replies import ENGINE_DIED, VERSION


class Line(NamedTuple):
    """One line of log, `wait_s` after the one before. Without `who` it is bare and goes to stderr."""

    text: str
    who: Literal["APIServer", "EngineCore"] | None = None
    where: str = ""
    level: str = "INFO"
    wait_s: float = 0.0

    def render(self, pid: int, clock: str) -> str:
        if self.who is None:
            return self.text
        return f"({self.who} pid={pid}) {self.level} {clock} [{self.where}] {self.text}"


_CONSERVE = "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."
# vllm/v1/core/kv_cache_utils.py and vllm/v1/worker/cpu_worker.py of 0.32.0.
_REFUSALS: dict[Refusal, str] = {
    "kv-cache": (
        "ValueError: To serve at least one request with the model's max seq len ({max_model_len}), (2.5 GiB KV cache "
        "is needed, which is larger than the available KV cache memory (0.62 GiB). Based on the available memory, the "
        "estimated maximum model length is {estimate}. Try increasing `gpu_memory_utilization` (which also controls "
        "CPU memory on the CPU backend) or decreasing `max_model_len` when initializing the engine. " + _CONSERVE
    ),
    "no-blocks": (
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
        "initializing the engine (this flag also controls CPU memory reservation on the CPU backend, despite its "
        "name). " + _CONSERVE
    ),
    "memory": (
        "ValueError: Available memory on node 0 (4.9/6.59 GiB) on startup is less than desired CPU memory utilization "
        "(0.92, 6.06 GiB). On the CPU backend, the `--gpu-memory-utilization` flag controls the fraction of CPU memory "
        "reserved (despite its name). To resolve: decrease `--gpu-memory-utilization` (e.g. `--gpu-memory-utilization "
        "0.5`) or reduce CPU memory used by other processes."
    ),
}


def start(options: Options, port: int) -> Iterator[Line]:
    yield from _until_engine(options, port)
    yield from _until_weights(options)
    yield from _until_server(options, port)


def refuse(options: Options, port: int) -> Iterator[Line]:
    yield from _until_engine(options, port)
    if options.oom in ("kv-cache", "no-blocks"):
        yield from _until_weights(options)
    yield from _root_cause(_cause(options))


def ready(pid: int) -> Iterator[Line]:
    yield Line(f"INFO:     Started server process [{pid}]")
    yield Line("INFO:     Waiting for application startup.")
    yield Line("INFO:     Application startup complete.")


def stopping(timeout_s: float) -> Iterator[Line]:
    mode = "drain" if timeout_s else "abort"
    yield Line("[shutdown] API server: shutdown triggered", "APIServer", "launcher.py:254")
    text = f"[shutdown] API server: stopping engine client mode={mode} timeout={timeout_s:.0f}s"
    yield Line(text, "APIServer", "launcher.py:270")
    if timeout_s:
        text = f"[shutdown] EngineCore: draining in-flight requests timeout={timeout_s:.0f}s"
        yield Line(text, "EngineCore", "core.py:1655")


def stopped(pid: int) -> Iterator[Line]:
    yield Line("[shutdown] API server: shutting down FastAPI HTTP server", "APIServer", "launcher.py:304")
    yield Line("INFO:     Shutting down")
    yield Line("INFO:     Waiting for application shutdown.")
    yield Line("INFO:     Application shutdown complete.")
    yield Line(f"INFO:     Finished server process [{pid}]")


def died() -> Iterator[Line]:
    for text in (
        "AsyncLLM output_handler failed.",
        "Traceback (most recent call last):",
        f"vllm.v1.engine.exceptions.EngineDeadError: {ENGINE_DIED}",
    ):
        yield Line(text, "APIServer", "async_llm.py:906", "ERROR")


def port_taken() -> Iterator[Line]:
    yield Line("Traceback (most recent call last):")
    yield Line("OSError: [Errno 98] Address already in use")


def shards(n_done: int, n_total: int, elapsed_s: float) -> str:
    """One state of tqdm's bar, as vLLM formats it: the bar starts with a carriage return and ends its line."""
    head = f"\rLoading safetensors checkpoint shards: {100 * n_done / n_total:3.0f}% Completed | {n_done}/{n_total}"
    if not n_done:
        return f"{head} [{_clock(elapsed_s)}<?, ?it/s]"
    pace_s = elapsed_s / n_done
    rate = f"{pace_s:5.2f}s/it" if pace_s > 1 else f"{1 / max(pace_s, 1e-4):5.2f}it/s"
    return f"{head} [{_clock(elapsed_s)}<{_clock(pace_s * (n_total - n_done))}, {rate}]"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes:02d}:{rest:02d}"


def _until_engine(options: Options, port: int) -> Iterator[Line]:
    yield Line(f" ▄▄ ▄█ █     █     █ ▀▄▀ █  version {VERSION}", "APIServer", "api_utils.py:347")
    arguments = {"host": options.host, "port": port, "model": options.model, "served_model_name": [*options.names]}
    yield Line(f"non-default args: {arguments}", "APIServer", "api_utils.py:286")
    yield Line("Resolved architecture: FakeForCausalLM", "APIServer", "model.py:733")
    yield Line(f"Using max model len {options.max_model_len}", "APIServer", "model.py:2152")
    config = f"model='{options.model}', max_seq_len={options.max_model_len}, load_format=fake, device_config=cpu"
    text = f"Initializing a V1 LLM engine (v{VERSION}) with config: {config}"
    yield Line(text, "EngineCore", "core.py:133")


def _until_weights(options: Options) -> Iterator[Line]:
    place = "distributed_init_method=file:///tmp/vllm_dist_fake backend=gloo"
    yield Line(f"world_size=1 rank=0 local_rank=0 {place}", "EngineCore", "parallel_state.py:1906")
    yield Line(f"Starting to load model {options.model}...", "EngineCore", "cpu_model_runner.py:68")
    n_shards = max(1, options.shards)
    step_s = options.load_s / n_shards
    for n_done in range(n_shards + 1):
        yield Line(shards(n_done, n_shards, n_done * step_s), wait_s=step_s if n_done else 0.0)
    yield Line("")
    yield Line(f"Loading weights took {options.load_s:.2f} seconds", "EngineCore", "default_loader.py:501")


def _until_server(options: Options, port: int) -> Iterator[Line]:
    tokens, length = options.kv_cache_tokens, options.max_model_len
    cache = f"CPU KV cache size: {tokens:,} tokens"
    concurrency = f"Maximum concurrency for {length:,} tokens per request: {tokens / length:.2f}x"
    yield Line(f"{cache}, {concurrency}", "EngineCore", "kv_cache_utils.py:2327")
    text = "init engine (profile, create kv cache, warmup model) took 0.17 s"
    yield Line(text, "EngineCore", "core.py:402")
    yield Line(f"Starting vLLM server on http://{options.host}:{port}", "APIServer", "entry.py:140")


def _cause(options: Options) -> str:
    if options.oom is not None:
        estimate = options.max_model_len // 4
        return _REFUSALS[options.oom].format(max_model_len=options.max_model_len, estimate=estimate)
    message = options.crash_at_start or "asked to"
    return message if "Error: " in message else f"RuntimeError: {message}"


def _root_cause(cause: str) -> Iterator[Line]:
    """vLLM prints a cause twice, in the engine's log and as its traceback, and ends with a line that hides it."""
    for text in ("EngineCore failed to start.", "Traceback (most recent call last):", cause):
        yield Line(text, "EngineCore", "core.py:1510", "ERROR")
    yield Line("Process EngineCore:\nTraceback (most recent call last):")
    yield Line(cause)
    yield Line("Traceback (most recent call last):")
    yield Line(
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"
    )
