"""The deployment behind a load test: what was launched, what the planner predicts of it, and its calibration file."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import PenstockError, UserError

if TYPE_CHECKING:
    from penstock.bench.calibrate import Deployed
    from penstock.bench.results.folder import Result
    from penstock.bench.serve import Report
    from penstock.hardware.catalog import GpuFacts
    from penstock.planner import Plan
    from penstock.spec.deployment import Deployment


class Launch(NamedTuple):
    """What is known here of a deployment: its file and its plan. Empty: nothing is."""

    deployment: Deployment | None = None
    plan: Plan | None = None

    @property
    def versions(self) -> dict[str, str]:
        return {self.plan.engine: self.plan.engine_version} if self.plan else {}

    @property
    def model(self) -> str | None:
        return self.plan.model.path if self.plan else None

    @property
    def facts(self) -> dict[str, Any]:
        """What decides how fast an engine is, as a result keeps it; `gpu` is None where nothing was planned for one."""
        if self.plan is None or self.deployment is None:
            return {}
        layout, forecast, model = self.plan.layout, self.plan.forecast, self.plan.model
        is_folder = Path(model.reference).name == Path(model.path).name  # not a hub id, whose copy has another name
        return {
            "model": model.path if is_folder else model.reference,
            "gpu": forecast.key.gpu if forecast else None,
            "layout": [layout.tensor, layout.pipeline, layout.data],
            "expert": layout.expert,
            "nodes": self.plan.n_nodes,
            "network": self.deployment.hardware.network,
            "engine": self.plan.engine,
            "engine_version": self.plan.engine_version,
            "enforce_eager": bool(forecast and forecast.key.enforce_eager),
        }

    def tell(self, report: Report) -> None:
        """Writes into a run's result what was launched, and what the planner predicts of a load like it."""
        lengths = {
            (request.input_tokens, request.output_tokens) for request in report.requests if request.error is None
        }
        report.result["versions"] |= self.versions
        report.result["launch"] = self.facts or None
        try:
            report.result["predicted"] = predicted(self, report.result, has_equal_lengths=len(lengths) == 1)
        except Exception:  # noqa: BLE001 - what was measured is not lost for what cannot be predicted
            report.result["predicted"] = None

    def keep(self, folder: Path) -> None:
        """Write the file and the plan next to the results, without secrets: results are shared."""
        import msgspec

        from penstock.spec import reading, secret_values

        if self.deployment is not None and self.plan is not None:
            both = (self.deployment, self.plan)
            spec, plan = (secret_values.without_secrets(msgspec.to_builtins(each)) for each in both)
            shown = reading.to_yaml(msgspec.convert(spec, type(self.deployment)))
            (folder / "spec.yaml").write_text(shown, "utf-8")
            (folder / "plan.json").write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=2))


def behind(url: str, name: str | None = None) -> Launch:
    """The deployment of this penstock home whose gateway has that address, or of that name, where the address is that
    of a tunnel; empty for any other endpoint."""
    from penstock import run_folder

    address = url.removesuffix("/v1").rstrip("/")
    for run in run_folder.every():
        try:
            if run.is_ended() or (run.name != name if name else run.known_url != address):
                continue
            return Launch(run.deployment(), run.plan())
        except PenstockError:  # a damaged folder
            continue
    return Launch()


def predicted(launch: Launch, result: Mapping[str, Any], *, has_equal_lengths: bool) -> dict[str, Any] | None:
    """`speed` of `penstock plan --json` for the closed loop that was measured: equally long requests come in groups.

    None for an open loop, an engine without a GPU, and what does not fit.  Raises NotModelled and UserError.
    """
    import msgspec

    from penstock.deployment import planning
    from penstock.models import facts

    plan, deployment = launch.plan, launch.deployment
    pace = result["pace"]
    n_done, is_open = result["completed"], pace["concurrency"] is None or pace.get("rate") is not None
    n_in, n_out = result["total_input_tokens"], result["total_output_tokens"]
    if plan is None or deployment is None or plan.forecast is None or is_open or not (n_done and n_in and n_out):
        return None
    at_once = result["max_concurrent_requests"]  # fewer than were asked for, where there are not so many requests
    of_one = math.ceil(at_once / max(1, len(result["replicas"])))
    of_model = facts.read(plan.model.path if Path(plan.model.path).is_dir() else plan.model.reference)
    request = msgspec.structs.replace(
        planning.request_of(deployment, of_model, plan.forecast.key.gpu),
        gpus_per_node=plan.ranks_each,
        nodes=plan.n_nodes,
        tensor=plan.layout.tensor,
        pipeline=plan.layout.pipeline,
        data=plan.layout.data,
        expert=plan.layout.expert,
        engine_version=plan.engine_version,
        max_model_len=plan.max_model_len,
        input_tokens=max(1, round(n_in / n_done)),
        output_tokens=max(1, round(n_out / n_done)),
        concurrency=of_one,
    )
    speed = planning.speed(request, rounds=n_done / at_once if has_equal_lengths else None)
    if speed is None:
        return None
    prediction = {
        "ttft_ms": speed.ttft_ms,
        "tpot_ms": speed.tpot_ms,
        "output_tokens_per_s": speed.output_tokens_per_s * (at_once / of_one),
        "requests_per_s": speed.requests_per_s * (at_once / of_one),
    }
    return {name: msgspec.to_builtins(value) for name, value in prediction.items()}


def deployed_of(options: argparse.Namespace, launch: Mapping[str, Any]) -> Deployed:
    """What a calibration describes: flags, else what was launched, else TP 1 on this GPU.  Raises UserError."""
    from penstock.bench.calibrate import Deployed
    from penstock.hardware import catalog
    from penstock.models import facts
    from penstock.planner import engine_versions
    from penstock.spec.deployment import Parallel

    if launch.get("engine", "vllm") != "vllm":
        raise UserError(
            f"cannot calibrate from runs of {launch['engine']}", detail="The planner's constants are of vLLM on GPUs."
        )
    model = options.calibrate_model or launch.get("model")
    if model is None:
        raise UserError("cannot calibrate without the model's name", hint="--calibrate-model llama-3.1-8b")
    sizes = dict(zip(("tensor", "pipeline", "data"), options.layout or launch.get("layout") or (1,), strict=False))
    is_named = options.layout is not None
    network = None if is_named else launch.get("network")
    return Deployed(
        facts.read(model),
        _card(options.gpu, launch.get("gpu")),
        Parallel(**sizes, expert=bool(launch.get("expert")) and not is_named),
        str(options.engine_version or launch.get("engine_version") or engine_versions.NEWEST),
        n_nodes=1 if is_named else launch.get("nodes", 1),
        network=catalog.link(network) if network else None,
        is_eager=bool(launch.get("enforce_eager")),
    )


def _card(named: str | None, launched: str | None) -> GpuFacts:
    """The GPU by its catalogue id; or this machine's, also one that the catalogue does not have.  Raises UserError."""
    from penstock.deployment import planning
    from penstock.hardware import catalog, detect

    if named is None and (here := detect.gpus()):
        own = planning.card_of(here)
        if launched in (None, own.id):
            return own
    gpu = named or launched
    if gpu is None:
        raise UserError("cannot calibrate: this machine has no GPU, and none was named", hint="--gpu h100-sxm")
    return catalog.gpu(gpu)


def calibrated(options: argparse.Namespace, runs: Sequence[Result]) -> str:
    from penstock.bench import calibrate
    from penstock.planner.speed import calibration

    named = (options.calibrate_model, options.gpu, options.layout, options.engine_version)
    launch = {} if all(named) else _launch_of(runs)
    return calibration.write(calibrate.calibrated(runs, deployed_of(options, launch)))


def _launch_of(runs: Sequence[Result]) -> Mapping[str, Any]:
    """What was launched; empty where no run knows it.  Raises UserError where they differ: constants are of one."""
    launches = [run.summary.get("launch") or {} for run in runs]
    unlike = {json.dumps(launch, sort_keys=True): launch for launch in launches}
    if len(unlike) > 1:
        raise UserError(
            f"cannot calibrate from runs of {len(unlike)} different launches",
            detail="\n".join(_words(launch) for launch in unlike.values()),
            hint="Give the runs of one; or name --calibrate-model, --gpu, --layout and --engine-version.",
        )
    return launches[0]


def _words(launch: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in launch.items() if value) or "unknown"
