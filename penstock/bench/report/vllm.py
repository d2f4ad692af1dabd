"""A run as the file that `vllm bench serve --save-result --save-detailed` writes.

https://github.com/vllm-project/vllm/blob/main/vllm/benchmarks/serve.py (0.32). Texts of answers are not kept.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.bench.results import folder
from penstock.bench.results.stats import METRICS

_SAME = (
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"),
    *("request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s"),
    "max_concurrent_requests",
)


def save(run: Path) -> None:
    """Write vllm.json into a run's folder.  Raises UserError."""
    result = msgspec.json.decode((run / folder.RESULT).read_bytes())
    gaps = ((int(row["index"]), float(row["itl_ms"])) for row in folder.rows(run / folder.GAPS))
    with folder.writable(run):
        facts = saved_result(result, list(folder.rows(run / folder.REQUESTS)), gaps)
        (run / "vllm.json").write_bytes(msgspec.json.encode(facts))


def saved_result(
    result: Mapping[str, Any], rows: Sequence[Mapping[str, str]], gaps: Iterable[tuple[int, float]]
) -> dict[str, Any]:
    """`result` is result.json, `rows` those of requests.csv, `gaps` those of itl.csv: (index, ms) in order."""
    pace, flags = result["pace"], result["flags"]
    backend = "openai-chat" if result["service"]["endpoint"] == "chat" else "openai"
    by_index = {index: [ms / 1000 for _, ms in each] for index, each in itertools.groupby(gaps, lambda gap: gap[0])}
    facts = {
        "date": time.strftime("%Y%m%d-%H%M%S", time.localtime(result["began_at"])),
        "endpoint_type": backend,
        "backend": backend,
        "label": None,
        "model_id": result["model"],
        "tokenizer_id": flags.get("tokenizer") or result["model"],
        "num_prompts": len(rows),
        "request_rate": pace["rate"] or "inf",
        "burstiness": pace["burstiness"],
        "max_concurrency": pace["concurrency"],
        **{name: result[name] for name in _SAME},
        "input_lens": [int(row["input_tokens"] or 0) for row in rows],
        "output_lens": [int(row["output_tokens"] or 0) for row in rows],
        "ttfts": [float(row["ttft_ms"] or 0) / 1000 for row in rows],
        "itls": [by_index.get(int(row["index"]), []) for row in rows],
        "latencies": [float(row["e2el_ms"] or 0) / 1000 for row in rows],
        "start_times": [float(row["sent_s"]) for row in rows],
        "queue_times": [max(0.0, float(row["sent_s"]) - float(row["intended_s"])) for row in rows],
        "generated_texts": ["" for _ in rows],
        "errors": [row["error"] for row in rows],
    }
    return facts | {name: value for name, value in result.items() if name.endswith(tuple(f"_{m}_ms" for m in METRICS))}
