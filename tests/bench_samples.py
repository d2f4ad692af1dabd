"""Runs of load tests made from a seed, as `bench serve` writes them: shared by the tests of what reads them."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

QUANTILES = (("median", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99), ("max", 1.0))


def write_run(folder: Path, seed: int = 0, n: int = 300, slower: float = 1.0, **changed: Any) -> Path:
    """An open loop of `n` requests at 10 a second; all times longer by `slower`. Every 50th request fails."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    gaps, at = [], 0.0
    for index in range(n):
        at += rng.expovariate(10)
        ttft, tpot = 100 * slower * rng.lognormvariate(0, 0.3), 20 * slower * rng.lognormvariate(0, 0.1)
        tokens, is_ok = rng.randint(40, 80), index % 50 != 49
        end = at + (ttft + tpot * (tokens - 1)) / 1000
        gaps += [rng.gauss(tpot, 1) for _ in range(3)]
        row: dict[str, Any] = {"index": index, "intended_s": round(at, 6), "sent_s": round(at + 0.0002, 6)}
        row["end_s"] = round(end, 6)
        row |= {"ttft_ms": round(ttft, 3), "tpot_ms": round(tpot, 3), "e2el_ms": round(1000 * (end - at), 3)}
        row |= {"input_tokens": 100, "output_tokens": tokens, "status": 200, "error": "", "replica": index % 2}
        if not is_ok:
            row |= {"ttft_ms": "", "tpot_ms": "", "output_tokens": 0, "status": 503, "error": "http 503"}
        rows.append(row)
    with (folder / "requests.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    lines = [f"{at // 3},{gap:.3f}" for at, gap in enumerate(gaps)]
    (folder / "itl.csv").write_text("\n".join(["index,itl_ms", *lines, ""]))
    engine = [(second, rng.randint(5, 15), max(0, second - 20), 0.3 + second / 100) for second in range(int(at))]
    lines = ["time_s,running,waiting,kv_use", *(",".join(map(str, row)) for row in engine)]
    (folder / "engine.csv").write_text("\n".join(lines) + "\n")
    (folder / "result.json").write_text(json.dumps(_summary(rows, gaps) | changed))
    return folder


def _summary(rows: list[dict[str, Any]], gaps: list[float]) -> dict[str, Any]:
    done = [row for row in rows if not row["error"]]
    duration = max(float(row["end_s"]) for row in rows)
    n_out = sum(row["output_tokens"] for row in done)
    found: dict[str, Any] = {
        "completed": len(done), "failed": len(rows) - len(done), "duration": duration, "valid": True, "model": "m",
        "request_throughput": len(done) / duration, "output_throughput": n_out / duration,
        "total_token_throughput": (n_out + 100 * len(done)) / duration,
        "generator": {"cpu_share": 0.08, "lateness_p99_ms": 0.9},
        "flags": {"url": "http://127.0.0.1:9110", "rate": 10.0, "requests": len(rows)},
        "versions": {"penstock": "0.1.0", "engine": "vllm 0.32.0"},
        "machine": {"host": "a", "gpus": ["NVIDIA H100 80GB HBM3"]},
    }  # fmt: skip
    for name in ("ttft", "tpot", "e2el", "itl"):
        values = sorted(gaps if name == "itl" else [float(row[f"{name}_ms"]) for row in done])
        found[f"mean_{name}_ms"] = sum(values) / len(values)
        found |= {f"{word}_{name}_ms": values[min(len(values) - 1, int(q * len(values)))] for word, q in QUANTILES}
    return found
