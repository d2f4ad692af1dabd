"""What the planner predicts against what was measured: every point of data/speed_points.yaml, worst first.

    python benchmarks/plan_speed.py [--split held_out] [--write-docs]

`tuned` points may have moved constants of penstock/planner/speed/estimate.py, `held_out` ones never did.
Nothing is run: the points are published ones (each with its source) and runs of our own (`url: own`).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.hardware import catalog
from penstock.models import facts
from penstock.planner.architecture import dense
from penstock.planner.inputs import model_costs
from penstock.planner.speed import work
from penstock.planner.speed.collectives import Fabric
from penstock.planner.speed.estimate import Engine, Speed, estimate
from penstock.spec.deployment import Parallel, Workload

POINTS = Path(__file__).parent / "data" / "speed_points.yaml"
DOCS = Path(__file__).parent.parent / "docs" / "measurements" / "plan-speed.md"
CONSTANTS = Path(__file__).parent / "data" / "speed_constants.md"


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measured deployment and load. `source` and `url` say where it stands; lengths are means, times in ms."""

    source: str
    url: str
    date: str
    engine: str
    statistic: str
    split: str
    model: str
    gpu: str
    concurrency: int
    input: int
    output: int
    ttft: float | None = None
    tpot: float | None = None
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    format: str | None = None
    lengths: str = "varied"
    cache_bytes: float = 2.0
    max_num_batched_tokens: int = 8192
    max_running: int | None = None
    rounds: float = 1.0
    gpus_per_node: int = 8
    nodes: int = 1
    network: str | None = None


class Row(NamedTuple):
    """One number of a point. `error` is predicted / measured - 1."""

    point: Point
    what: str
    measured: float
    predicted: float
    group: str

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def load(path: Path = POINTS) -> tuple[list[Point], dict[str, Any]]:
    """(the points, the checkpoint formats they name)."""
    import yaml

    plain = yaml.safe_load(path.read_text(encoding="utf-8"))
    points = [
        msgspec.convert(
            {"source": source["name"], "url": source["url"], **source["about"], **source["shared"], **point}, Point
        )
        for source in plain["sources"]
        for point in source["points"]
    ]
    return points, plain["formats"]


def config_of(point: Point, formats: Mapping[str, Any]) -> dict[str, Any]:
    """The model's config.json, with the point's own checkpoint format."""
    config = dict(facts.read(point.model).config)
    if point.format is not None:
        config["quantization_config"] = formats[point.format]
    return config


def predicted(point: Point, formats: Mapping[str, Any]) -> tuple[Speed, work.StepCosts]:
    """What the planner says of a point, without calibration."""
    counted = model_costs(dense.read(config_of(point, formats)))
    network = catalog.link(point.network) if point.network else None
    speed = estimate(
        counted,
        Parallel(point.tensor, point.pipeline, point.data, point.expert),
        Fabric(catalog.gpu(point.gpu), point.gpus_per_node, point.nodes, network),
        Workload(point.input, point.output, point.concurrency),
        Engine(point.engine, False, point.cache_bytes, point.max_num_batched_tokens, point.max_running),
        rounds=point.rounds if point.lengths == "fixed" else None,
    )
    return speed, counted


def rows_of(points: Iterable[Point], formats: Mapping[str, Any]) -> list[Row]:
    """Every measured number against the prediction, the worst first."""
    rows = []
    for point in points:
        speed, counted = predicted(point, formats)
        group = f"{'moe' if counted.n_moe_layers else 'dense'} {counted.weight_kind or 'bf16'} {point.gpu}"
        ttft = speed.ttft_steady_ms if point.statistic == "median" and point.lengths == "varied" else speed.ttft_ms
        both = (("TTFT", point.ttft, ttft.likely), ("TPOT", point.tpot, speed.tpot_ms.likely))
        rows += [Row(point, what, measured, likely, group) for what, measured, likely in both if measured]
    return sorted(rows, key=lambda row: -abs(row.error))


def median(rows: Iterable[Row]) -> float:
    """The median of the errors' sizes."""
    return statistics.median(abs(row.error) for row in rows)


def medians(rows: list[Row]) -> list[tuple[str, str, int, float, float]]:
    """(number, group, count, median of the errors' sizes, median error) over all, by split and by class of model."""
    found = []
    for what in ("TPOT", "TTFT"):
        ours = [row for row in rows if row.what == what]
        groups = {"all": ours}
        for row in ours:
            groups.setdefault(row.point.split, []).append(row)
        for row in sorted(ours, key=lambda row: (row.group, row.point.split)):
            groups.setdefault(f"{row.group}, {row.point.split}", []).append(row)
        found += [
            (what, name, len(some), median(some), statistics.median(row.error for row in some))
            for name, some in groups.items()
            if some
        ]
    return found


def _cells(row: Row) -> tuple[str, ...]:
    point = row.point
    size = "".join(
        f"{letter}{n}" for letter, n in (("TP", point.tensor), ("PP", point.pipeline), ("DP", point.data)) if n > 1
    )
    layout = (size or "TP1") + ("+EP" if point.expert else "")
    return (
        row.what,
        f"{row.error:+.0%}",
        f"{row.predicted:.1f}",
        f"{row.measured:.1f}",
        point.model + (f" {point.format}" if point.format else ""),
        f"{point.gpu} {layout}",
        f"{point.input}/{point.output} c{point.concurrency}",
        point.engine,
        point.split,
        point.source,
    )


_HEAD = ("", "error", "predicted ms", "measured ms", "model", "GPU", "in/out", "vLLM", "split", "source")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, tuple("---" for _ in head), *rows)]
    return "\n".join(lines) + "\n"


_INTRODUCTION = """
What `penstock plan` predicts without calibration against latencies that others published. `tuned` points moved
constants, `held_out` ones did not; the split was set by source, before. We did see the held-out errors while the form
of the model was made, so they are not blind. Points of vLLM before 0.11, which the planner no longer knows, left the
table. A TTFT is compared with the prediction of the same statistic: the mean of a benchmark, the median of requests
that come by themselves, or the mean of equally long requests over as many rounds as the benchmark had (in the first
round all come at once, later arrivals follow departures). `penstock plan` prints the first of the three, with the
second as its low end: at concurrency 64 and long prompts the median of a benchmark is two to four times lower than its
mean. Worst first.
""".strip()


def page(rows: list[Row]) -> str:
    """docs/measurements/plan-speed.md."""
    sources = {row.point.source: row.point for row in rows}
    by_name = ((what, name, str(n), f"{size:.0%}", f"{signed:+.0%}") for what, name, n, size, signed in medians(rows))
    lines = (
        "# Predicted and measured speed",
        "<!-- Made by benchmarks/plan_speed.py --write-docs from benchmarks/data/speed_points.yaml: do not edit. -->",
        _INTRODUCTION,
        "## Medians",
        _table(("", "points", "count", "median error", "median, signed"), by_name),
        "## Every number",
        _table(_HEAD, map(_cells, rows)),
        CONSTANTS.read_text("utf-8"),
        "## Sources",
        "\n".join(
            f"- {name} ({one.date}, vLLM {one.engine}, {one.statistic}): <{one.url}>"
            if one.url != "own"
            else f"- {name} ({one.date}, vLLM {one.engine}, {one.statistic}): our own runs"
            for name, one in sources.items()
        )
        + "\n",
    )
    return "\n\n".join(line.rstrip("\n") for line in lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare predicted with measured speed.")
    parser.add_argument("--split", choices=("tuned", "held_out"), help="only these points")
    parser.add_argument("--write-docs", action="store_true", help="write docs/measurements/plan-speed.md")
    options = parser.parse_args()
    points, formats = load()
    rows = rows_of((point for point in points if options.split in (None, point.split)), formats)
    if options.write_docs:
        DOCS.write_text(page(rows), encoding="utf-8")
        return
    for row in rows:
        what, error, likely, measured, model, gpu, load_, *rest = _cells(row)
        print(f"{what} {error:>6} {likely:>8} {measured:>8}  {model:44} {gpu:22} {load_:18} {'  '.join(rest)}")
    print()
    for what, name, n, size, signed in medians(rows):
        print(f"{what}  {name:44} n={n:3}  median |error| {size:5.0%}  signed {signed:+5.0%}")


if __name__ == "__main__":
    main()
