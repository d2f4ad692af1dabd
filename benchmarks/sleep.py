"""How long an engine takes to fall asleep and to wake, what that frees, and a start for comparison.

    python benchmarks/sleep.py llama-3.1-8b [--rounds 3] [--level 1] [--json]
    python benchmarks/sleep.py llama-3.1-8b --files /scratch/model --level 1 --level 2

Needs a GPU, vLLM and nothing else: the weights are dummies, or with `--files` random ones of a dense Llama's shapes,
written to that folder once (level 2 reads the files again, so it needs some). Each level is a deployment of its own:
`up`, one token, then rounds of a token awake, `sleep`, memory, and a request that wakes it. All through the gateway, as
a client sees it. `--engine fake` rehearses without a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from penstock import run_folder
from penstock.deployment import library, orders
from penstock.hardware.detect import gpus
from penstock.models import catalog
from penstock.models.files import BUNDLED
from penstock.run_folder import Run
from penstock.text import GIB
from penstock.wire.client import Client

SHARD_BYTES = 4 * GIB


class Round(NamedTuple):
    """Seconds; the engine's own are those of its calls, the others those of a client. Memory: of all GPUs, in GiB."""

    sleep_s: float
    sleep_own_s: float
    freed_gib: float
    held_gib: float
    wake_to_token_s: float
    wake_own_s: float
    awake_token_s: float


def used_gib() -> float:
    return sum(gpu.memory_bytes - gpu.memory_free_bytes for gpu in gpus()) / GIB


def token_s(client: Client) -> float:
    """From a request to the first token of its answer."""
    began_at = time.monotonic()
    for _ in client.stream_complete("1", max_tokens=1):
        return time.monotonic() - began_at
    raise RuntimeError("an answer without a token")


def measured(run: Run, name: str) -> float:
    """A number of the only replica's engine."""
    announcement = library.status(run.name).replicas[0].announcement
    return math.nan if announcement is None else announcement.measured.get(name, math.nan)


def one_round(run: Run, client: Client) -> Round:
    awake_token_s, before_gib, began_at = token_s(client), used_gib(), time.monotonic()
    orders.wait_ordered(run, "sleep", orders.order(run, "sleep"), lambda _: None, 900.0)
    sleep_s, held_gib = time.monotonic() - began_at, used_gib()
    sleep_own_s = measured(run, "sleep_s")
    wake_to_token_s = token_s(client)
    time.sleep(1.5)  # the controller writes what the node announced
    return Round(
        *(sleep_s, sleep_own_s, before_gib - held_gib, held_gib),
        *(wake_to_token_s, measured(run, "wake_s"), awake_token_s),
    )


def deployed(folder: Path, options: argparse.Namespace, level: int) -> dict[str, Any]:
    engine: dict[str, Any] = {"kind": options.engine, "sleep": {"level": level}}
    if options.engine == "vllm":
        args = {} if options.files else {"load-format": "dummy"}
        engine |= {"max_model_len": 8192, "args": args, "env": {"NCCL_NVLS_ENABLE": "0"}}
    gateway = {"port": 0, "hold_s": 900}
    return {"name": f"sleep-{level}", "model": str(folder), "engine": engine, "gateway": gateway}


def measure(folder: Path, options: argparse.Namespace, level: int) -> dict[str, Any]:
    began_at, empty_gib = time.monotonic(), used_gib()
    started = library.up(deployed(folder, options, level))
    try:
        up_s, run, client = time.monotonic() - began_at, run_folder.find(started.name), started.client()
        first_token_s = token_s(client)
        rounds = [one_round(run, client) for _ in range(options.rounds)]
        start = {"up_s": up_s, "first_token_s": first_token_s, "empty_gib": empty_gib, "awake_gib": used_gib()}
        return {"level": level, **start, "rounds": [row._asdict() for row in rounds]}
    finally:
        library.down(started.name, now=True)


def write_folder(model: str, folder: Path) -> None:
    """The model's config with the bundled tokenizer, whose ids are few."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in BUNDLED.iterdir():
        if (path.suffix == ".json" and "index" not in path.name) or path.name.startswith("tokenizer"):
            shutil.copy(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(catalog.model_config(model)))


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor of a dense Llama."""
    width, inner, words = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = config.get("head_dim") or width // config["num_attention_heads"]
    queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (words, width)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        rows = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
        rows |= {"mlp.gate_proj": inner, "mlp.up_proj": inner}
        yield from ((f"{layer}.{name}.weight", (size, width)) for name, size in rows.items())
        yield f"{layer}.self_attn.o_proj.weight", (width, queries)
        yield f"{layer}.mlp.down_proj.weight", (width, inner)
        yield from ((f"{layer}.{name}.weight", (width,)) for name in ("input_layernorm", "post_attention_layernorm"))
    yield "model.norm.weight", (width,)
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", (words, width)


def write_weights(folder: Path) -> None:
    """Random weights in bfloat16, in shards of some GiB with their index; nothing where they are."""
    import torch
    from safetensors.torch import save_file

    index = folder / "model.safetensors.index.json"
    if index.exists():
        return
    device, places = "cuda" if torch.cuda.is_available() else "cpu", dict[str, str]()
    shard, n_bytes, number = dict[str, Any](), 0, 0

    def write() -> None:
        nonlocal shard, n_bytes, number
        number += 1
        name = f"model-{number:05}.safetensors"
        save_file(shard, str(folder / name), {"format": "pt"})
        places.update(dict.fromkeys(shard, name))
        shard, n_bytes = {}, 0

    for name, shape in shapes(json.loads((folder / "config.json").read_text())):
        shard[name] = (torch.randn(shape, device=device) * 0.02).to(torch.bfloat16).cpu()
        n_bytes += 2 * math.prod(shape)
        if n_bytes >= SHARD_BYTES:
            write()
    write()
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))


def table(result: dict[str, Any]) -> str:
    rounds = result["rounds"]
    lines = [
        f"level {result['level']}: up {result['up_s']:.1f} s, first token {result['first_token_s']:.3f} s; GPU memory "
        f"{result['empty_gib']:.1f} GiB before, {result['awake_gib']:.1f} awake",
        "| round | sleep | of it the engine | freed GiB | still held GiB | wake to token | of it the engine | awake |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = [(str(number), row) for number, row in enumerate(rounds, 1)]
    rows.append(("median", {name: statistics.median(row[name] for row in rounds) for name in Round._fields}))
    for number, row in rows:
        cells = [f"{row[name]:.1f}" if name.endswith("gib") else f"{row[name]:.2f} s" for name in Round._fields]
        lines.append(f"| {number} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a name of penstock's catalogue, or a folder with files")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--level", type=int, action="append", choices=(1, 2), help="may be repeated (default: 1)")
    parser.add_argument("--files", type=Path, help="write the weights there, and load them")
    parser.add_argument("--engine", choices=("vllm", "fake"), default="vllm")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.model)
        if not (folder / "config.json").exists():
            folder = options.files or Path(scratch) / "model"
            write_folder(options.model, folder)
            if options.files:
                writer = multiprocessing.get_context("spawn").Process(target=write_weights, args=(folder,))
                writer.start()  # its CUDA context ends with it
                writer.join()
        else:
            options.files = options.files or folder
        for level in options.level or [1]:
            result = measure(folder, options, level)
            print(json.dumps(result) if options.json else table(result), flush=True)


if __name__ == "__main__":
    main()
