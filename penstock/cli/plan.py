"""`penstock plan`: arguments and output. Exit codes: 0 fits, 3 does not, or too slow, 2 bad input, 4 not modelled."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.cli import arguments, output
from penstock.errors import UserError
from penstock.text import bare_flag

if TYPE_CHECKING:
    from penstock.hardware.catalog import GpuFacts
    from penstock.planner.request import SizingRequest
    from penstock.planner.speed.calibration import Calibrated

EXIT_FITS, EXIT_DOES_NOT_FIT = 0, 3

_count = arguments.token_count
_share = arguments.number(0, 1, is_above=True, what="a share")
_DTYPES = ("auto", "bfloat16", "half", "float16", "float", "float32")


class _Option(NamedTuple):
    """A flag with a value: the field of SizingRequest that it fills."""

    field: str
    kind: Any
    word: str
    text: str
    aliases: tuple[str, ...] = ()


_MACHINES = (
    _Option("gpu", str, "ID", "the GPU, a catalogue id (h100-sxm) or its driver's name; default: this machine's"),
    _Option("gpus_per_node", _count, "N", "GPUs in each node (default 1)", ("--gpus",)),
    _Option("nodes", _count, "M", "how many nodes (default 1)"),
    _Option("network", str, "ID", "what joins the nodes, a catalogue id"),
    _Option("gpu_memory_gib", arguments.positive, "GIB", "memory of one GPU as the CUDA runtime reports it"),
)
_LAYOUT = (
    _Option("tensor", _count, "T", "tensor-parallel size", ("-tp",)),
    _Option("pipeline", _count, "P", "pipeline-parallel size", ("-pp",)),
    _Option("data", _count, "D", "data-parallel size", ("-dp",)),
)
_ENGINE = (
    _Option("max_model_len", _count, "L", "tokens of one request, 128K is 131,072 (default: what the model allows)"),
    _Option("max_num_seqs", _count, "S", "requests in one step"),
    _Option("max_num_batched_tokens", _count, "B", "tokens in one step"),
    _Option("kv_cache_dtype", str, "DTYPE", "auto, bfloat16, fp8, fp8_e4m3, fp8_e5m2, nvfp4, ..."),
    _Option("quantization", str, "Q", "quantise on loading: fp8, ...; or plan a checkpoint in nvfp4 or int4"),
    _Option("gpu_memory_utilization", _share, "SHARE", "the engine's share of a GPU's memory"),
    _Option("block_size", _count, "K", "tokens of one KV-cache block"),
    _Option("engine_version", str, "V", "vLLM's version, 0.11 to 0.33 (default: the newest)"),
)
_WORKLOAD = (
    _Option("input_tokens", _count, "I", "tokens of a prompt (default 1000)"),
    _Option("output_tokens", _count, "O", "tokens of a reply (default 200)"),
    _Option("concurrency", _count, "C", "requests at once (default 8)"),
    _Option("ttft_ms", arguments.positive, "MS", "time to the first token that must be kept"),
    _Option("tpot_ms", arguments.positive, "MS", "time per further token that must be kept"),
    _Option("context_per_user", _count, "N", "tokens that one person's conversation holds, for the number of users"),
    _Option("think_time_s", arguments.positive, "S", "seconds a person thinks between a reply and the next prompt"),
)
_GROUPS = (
    ("machines", _MACHINES),
    ("layout (any of these evaluates that one alone)", _LAYOUT),
    ("engine", _ENGINE),
    ("workload", _WORKLOAD),
)


def register(parser: argparse.ArgumentParser) -> None:
    parser.usage = "penstock plan MODEL [--gpu ID] [--gpus N] [...]  (penstock plan --help lists all)"
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a folder with a config.json, a catalogue name, a hub id, or a deployment file (.yaml; flags go over it)",
    )
    groups = {}
    for title, options in _GROUPS:
        groups[options] = parser.add_argument_group(title)
        for option in options:
            words = {"type": option.kind, "metavar": option.word, "help": option.text}
            groups[options].add_argument(f"--{bare_flag(option.field)}", *option.aliases, **words)
    groups[_LAYOUT].add_argument("--expert", action="store_true", help="whole experts on each rank of a MoE model")
    engine = groups[_ENGINE]
    engine.add_argument("--dtype", choices=_DTYPES, help="dtype of weights and activations")
    engine.add_argument("--no-prefix-caching", action="store_true", help="without the reuse of equal beginnings")
    engine.add_argument(f"--{bare_flag('enforce_eager')}", action="store_true", help="without CUDA graphs")
    engine.add_argument(
        "--available-kv-gib",
        type=arguments.numbers,
        nargs="+",
        default=[],
        metavar="GIB",
        help="KV cache of a GPU, one value or one per pipeline stage: no estimate of memory, KV arithmetic alone",
    )
    engine.add_argument(
        "--no-measured", action="store_true", help="estimate also what an earlier start of this engine has measured"
    )
    groups[_WORKLOAD].add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="constants of speed that a benchmark of this deployment measured",
    )
    out = parser.add_argument_group("output")
    out.add_argument("--list", action="store_true", help="list the models, GPUs and networks of the catalogue")
    out.add_argument("--json", action="store_true", help="print JSON")
    out.add_argument("--explain", action="store_true", help="show each formula with its numbers")
    out.add_argument("--plot", type=Path, metavar="FILE", help="draw the answer into an .svg file")
    out.add_argument("--write", type=Path, metavar="FILE", help="write a file for `penstock up`, when it fits")
    out.add_argument("--force", action="store_true", help="let --write replace a file")
    examples = (
        "penstock plan llama-3.1-8b --gpu h100-sxm",
        "penstock plan Qwen/Qwen3-32B --gpu a100-80gb-sxm --gpus-per-node 8 --tpot-ms 40",
        "penstock plan deployment.yaml --explain",
        "penstock plan --list",
    )
    arguments.complete(parser, run, examples)


def run(options: argparse.Namespace) -> int:
    """Answer on standard output; the exit code.  Raises UserError (2) and NotModelled (4)."""
    from penstock.deployment import planning
    from penstock.planner import engine_limits
    from penstock.planner.explain import explanation
    from penstock.spec import reading

    if options.list:
        return _list(options.json)
    if options.model is None:
        raise UserError("cannot plan without a model", hint="Give one; `penstock plan --list` lists the catalogue.")
    _check_outputs(options)
    request, card = request_of(options)
    sizing = planning.solve(request, card, with_measured=not options.no_measured)
    if options.plot:
        from penstock.cli import plan_text

        _write(options.plot, plan_text.svg(request, sizing), force=True)
    is_good = sizing.fits and not sizing.missed
    is_written = is_good and engine_limits.checkpoint_to_make(request) is None
    if options.write and is_written:
        import yaml

        base = yaml.safe_load(Path(options.model).read_text("utf-8")) if reading.is_yaml(options.model) else {}
        _write(options.write, planning.deployment_text(request, sizing, base), options.force)
    formulas = explanation(request, sizing) if options.explain else {}
    if options.json:
        from penstock.planner.request import contract

        explained = {"explanation": formulas} if options.explain else {}
        print(json.dumps(contract(sizing) | explained))
    else:
        from penstock.cli import plan_text

        shown = output.width(plan_text.WIDTH), output.has_colour(sys.stdout)
        up = ["penstock", "up", str(options.write)] if options.write and is_written else None
        if up is None and sizing.fits and reading.is_yaml(options.model):
            up = planning.up_words(request, sizing, options.model)
        print(plan_text.text(request, sizing, *shown, up))
        if options.explain:
            print(f"\n{plan_text.explained(formulas, *shown)}")
        for path, is_there in ((options.plot, True), (options.write, is_written)):
            if path:
                why = (
                    "it needs another checkpoint" if is_good else "it is too slow" if sizing.fits else "it does not fit"
                )
                print(f"\nwrote {path}" if is_there else f"\ndid not write {path}: {why}")
    return EXIT_FITS if is_good else EXIT_DOES_NOT_FIT


def _list(as_json: bool) -> int:
    from penstock.hardware import catalog as hardware
    from penstock.models import catalog

    models = {name: catalog.model(name) for name in catalog.model_names()}
    gpus = [hardware.gpu(name) for name in hardware.gpu_ids()]
    networks = [name for name in hardware.link_ids() if hardware.link(name).transport not in ("nvlink", "pcie")]
    if as_json:
        rows = [
            {"name": name, "hub_id": row.hf_id, "params": row.params, "format": row.quant_method or row.dtype}
            for name, row in models.items()
        ]
        cards = [{"id": card.id, "memory_gib": card.memory.torch_total_gib, "names": card.names} for card in gpus]
        output.print_json({"models": rows, "gpus": cards, "networks": networks})
        return 0
    cells = [
        (name, f"{row.params / 1e9:.1f}B" if row.params else "", row.quant_method or row.dtype, row.hf_id)
        for name, row in models.items()
    ]
    print(output.table(cells, ("MODEL", "PARAMS", "FORMAT", "HUB ID"), right=(1,)))
    memory = [(card.id, f"{card.memory.torch_total_gib:.1f} GiB", card.names[0]) for card in gpus]
    print(f"\n{output.table(memory, ('GPU', 'MEMORY', 'NAME'), right=(1,))}")
    print(f"\n{output.table([(name,) for name in networks], ('NETWORK',))}")
    return 0


def request_of(options: argparse.Namespace) -> tuple[SizingRequest, GpuFacts | None]:
    """The request, and the card when it is this machine's. Flags go over a deployment file.  Raises UserError."""
    from penstock.deployment import planning
    from penstock.spec import reading

    given = {
        option.field: value
        for _, group in _GROUPS
        for option in group
        if (value := getattr(options, option.field)) is not None
    }
    if given.keys() & {option.field for option in _LAYOUT}:  # a layout of flags replaces the file's
        given = {"tensor": None, "pipeline": None, "data": None, "expert": False, **given}
    switches = {
        "expert": options.expert or None,
        "dtype": options.dtype,
        "prefix_caching": False if options.no_prefix_caching else None,
        "enforce_eager": options.enforce_eager or None,
        "available_kv_gib": tuple(value for values in options.available_kv_gib for value in values) or None,
        "calibration": _calibration(options.calibration) if options.calibration else None,
    }
    given |= {field: value for field, value in switches.items() if value is not None}
    source = reading.load(Path(options.model)) if reading.is_yaml(options.model) else options.model
    return planning.request_for(source, given)


def _calibration(path: Path) -> Calibrated:
    from penstock.planner.speed import calibration

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "it is not text"
        raise UserError(f'cannot read calibration "{path}": {why}', hint="Give a file of `--calibrate`.") from exc
    return calibration.read(text, str(path))


def _check_outputs(options: argparse.Namespace) -> None:
    """Before the work, not after it."""
    if options.plot and options.plot.suffix.lower() != ".svg":
        raise UserError(f'cannot draw "{options.plot}": pictures are SVG', hint="Name a file that ends in .svg.")
    if options.plot and not options.plot.absolute().parent.is_dir():
        raise UserError(f'cannot write "{options.plot}": no such folder')
    if options.write and not options.force and options.write.exists():
        raise UserError(f'cannot write "{options.write}": the file exists', hint="Add --force to replace it.")


def _write(path: Path, text: str, force: bool) -> None:
    try:
        with path.open("w" if force else "x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as exc:
        raise UserError(f'could not write "{path}": {exc.strerror}') from exc
