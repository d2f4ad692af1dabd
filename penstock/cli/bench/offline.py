"""`penstock bench throughput` and `penstock bench latency`: rows of vLLM's own benchmarks, one for each tensor size."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from penstock.cli.arguments import add_json, complete, count, count_or_zero, deployment_of
from penstock.cli.bench.arguments import add_layouts, add_lengths, add_seed
from penstock.cli.output import print_json, print_step

if TYPE_CHECKING:
    from penstock.bench.offline import Row, Task


def register_throughput(sub: argparse.ArgumentParser) -> None:
    add_layouts(sub, (1,))
    sub.add_argument("--num-prompts", type=count, default=100, metavar="N", help="how many (default: 100)")
    text = "random, sharegpt:FILE, prefix:n=8,prefix=1000,suffix=100 (default: random)"
    sub.add_argument("--dataset", default="random", metavar="KIND:FILE", help=text)
    add_lengths(sub, "of a random prompt", "of every answer")
    sub.add_argument("--warmup", type=count_or_zero, default=0, metavar="N", help="prompts before, not timed")
    add_seed(sub, "of the prompts")
    add_json(sub)
    complete(sub, _throughput, ["penstock bench throughput Qwen/Qwen3-8B --num-prompts 200 --tensor 1,2"])


def register_latency(sub: argparse.ArgumentParser) -> None:
    add_layouts(sub, (1,))
    for flag, default, text in (
        ("--batch-size", 8, "prompts in the batch"),
        ("--input-len", 32, "tokens of each prompt"),
        ("--output-len", 128, "tokens of each answer"),
        ("--num-iters", 10, "rounds that are timed"),
    ):
        sub.add_argument(flag, type=count, default=default, metavar="N", help=text)
    sub.add_argument("--num-iters-warmup", type=count_or_zero, default=3, metavar="N", help="rounds before, not timed")
    add_seed(sub, "of the prompts")
    add_json(sub)
    complete(sub, _latency, ["penstock bench latency Qwen/Qwen3-8B --batch-size 8 --input-len 1024 --tensor 1,2"])


def _throughput(options: argparse.Namespace) -> int:
    from penstock.bench import offline

    lengths = options.input_tokens, options.output_tokens
    task = offline.throughput_task(options.dataset, options.num_prompts, options.warmup, options.seed, *lengths)
    return _run(options, task)


def _latency(options: argparse.Namespace) -> int:
    from penstock.bench import offline

    shape = options.batch_size, options.input_len, options.output_len
    n_rounds = options.num_iters_warmup, options.num_iters
    return _run(options, offline.latency_task(shape, n_rounds, options.seed))


def _run(options: argparse.Namespace, task: Task) -> int:
    """Print each row as it is measured; as JSON all at the end, or those there are when it is interrupted."""
    from penstock.bench import offline

    rows: list[Row] = []
    try:
        for row in offline.run(deployment_of(options), options.tensor, task, print_step):
            if not options.json:
                print(offline.line(row) if rows else f"{offline.HEADS[task.verb]}\n{offline.line(row)}", flush=True)
            rows.append(row)
    finally:
        if options.json and rows:
            print_json(offline.facts(rows))
    return 1 if any(row.is_broken for row in rows) else 0
