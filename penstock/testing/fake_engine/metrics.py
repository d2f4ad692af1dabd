"""What the fake engine counts, and its /metrics page with vLLM 0.32.0's names. Pure: no clock, no socket."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping

from penstock.testing.fake_engine.options import Options

# Buckets and names as vllm 0.32.0's /metrics shows them (tests/golden/vllm-0.32.0/metrics.txt).
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
         160.0, 640.0, 2560.0)  # fmt: skip
_GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
            960.0, 1920.0, 7680.0)  # fmt: skip
_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LENGTH = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by level
_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


class Histogram:
    """Counts per bucket; `edges` are the upper bounds, ascending."""

    def __init__(self, edges: tuple[float, ...]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.total = 0.0

    def add(self, value: float, n: int = 1) -> None:
        self.counts[bisect_left(self.edges, value)] += n
        self.total += value * n


class Metrics:
    """Counters of one engine. An "engine step" here is one write of one request; real vLLM batches requests."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.n_running = 0
        self.n_waiting = 0
        self.kv_tokens = 0
        self.sleep_level = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys(_FINISH_REASONS, 0)
        self.step_tokens = Histogram(_STEP)
        self.ttft_s = Histogram(_TTFT)
        self.gap_s = Histogram(_GAP)
        self.latency_s = Histogram(_LATENCY)
        self.queue_s = Histogram(_LATENCY)
        self.request_prompt_tokens = Histogram(_LENGTH)
        self.request_generation_tokens = Histogram(_LENGTH)

    def started(self, n_prompt_tokens: int, queued_s: float) -> None:
        self.n_running += 1
        self.kv_tokens += n_prompt_tokens
        self.queue_s.add(queued_s)

    def prefilled(self, n_prompt_tokens: int, ttft_s: float) -> None:
        self.prompt_tokens += n_prompt_tokens
        self.step_tokens.add(n_prompt_tokens)
        self.ttft_s.add(ttft_s)

    def decoded(self, n_tokens: int, gap_s: float | None) -> None:
        """`n_tokens` more of one request, `gap_s` after the ones before; None for the first."""
        self.generation_tokens += n_tokens
        self.kv_tokens += n_tokens
        self.step_tokens.add(1, n_tokens)
        if gap_s is not None:
            self.gap_s.add(gap_s / n_tokens, n_tokens)

    def ended(self, n_prompt_tokens: int, n_tokens: int, latency_s: float, reason: str) -> None:
        self.n_running -= 1
        self.kv_tokens -= n_prompt_tokens + n_tokens
        self.finished[reason] += 1
        self.latency_s.add(latency_s)
        self.request_prompt_tokens.add(n_prompt_tokens)
        self.request_generation_tokens.add(n_tokens)

    def page(self) -> str:
        labels = f'engine="0",model_name="{_escape(self.options.names[0])}"'
        lines: list[str] = []
        for name, kind, values in self._families():
            lines.append(f"# TYPE vllm:{name} {kind}")
            if isinstance(values, Histogram):
                lines += _histogram_lines(name, labels, values)
            else:
                lines += [f"vllm:{name}{{{labels}{extra}}} {float(value)}" for extra, value in values.items()]
        return "\n".join(lines) + "\n"

    def _families(self) -> Iterator[tuple[str, str, Mapping[str, float] | Histogram]]:
        tokens = self.options.kv_cache_tokens
        waiting = {',reason="capacity"': self.n_waiting, ',reason="deferred"': 0}
        yield "num_requests_running", "gauge", {"": self.n_running}
        yield "num_requests_waiting", "gauge", {"": self.n_waiting}
        yield "num_requests_waiting_by_reason", "gauge", waiting
        yield (
            "engine_sleep_state",
            "gauge",
            {f',sleep_state="{word}"': float(self.sleep_level == level) for level, word in enumerate(_SLEEP_STATES)},
        )
        yield "kv_cache_usage_perc", "gauge", {"": min(1.0, self.kv_tokens / tokens)}
        yield "prefix_cache_queries_total", "counter", {"": self.prompt_tokens}
        yield "prefix_cache_hits_total", "counter", {"": 0}
        yield "num_preemptions_total", "counter", {"": 0}
        yield "prompt_tokens_total", "counter", {"": self.prompt_tokens}
        yield "prompt_tokens_cached_total", "counter", {"": 0}
        yield "generation_tokens_total", "counter", {"": self.generation_tokens}
        finished = {f',finished_reason="{reason}"': count for reason, count in self.finished.items()}
        yield "request_success_total", "counter", finished
        yield "request_prompt_tokens", "histogram", self.request_prompt_tokens
        yield "request_generation_tokens", "histogram", self.request_generation_tokens
        yield "iteration_tokens_total", "histogram", self.step_tokens
        yield "time_to_first_token_seconds", "histogram", self.ttft_s
        yield "inter_token_latency_seconds", "histogram", self.gap_s
        yield "e2e_request_latency_seconds", "histogram", self.latency_s
        yield "request_queue_time_seconds", "histogram", self.queue_s
        concurrency = tokens / self.options.max_model_len
        info = f',kv_cache_max_concurrency="{concurrency}",kv_cache_size_tokens="{tokens}"'
        yield "cache_config_info", "gauge", {info: 1}


def _histogram_lines(name: str, labels: str, histogram: Histogram) -> list[str]:
    lines = []
    below = 0
    for edge, count in zip((*map(str, map(float, histogram.edges)), "+Inf"), histogram.counts, strict=True):
        below += count
        lines.append(f'vllm:{name}_bucket{{{labels},le="{edge}"}} {float(below)}')
    lines.append(f"vllm:{name}_count{{{labels}}} {float(below)}")
    lines.append(f"vllm:{name}_sum{{{labels}}} {histogram.total}")
    return lines


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
