"""Constants of the speed model as a benchmark of one deployment measured them, and their file. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.errors import UserError
from penstock.planner.speed.estimate import WIDE_SPREAD, Calibration
from penstock.spec.deployment import Parallel

SCHEMA = 1

# What each number may be, in a file and in a fit. A share over 1 would beat the hardware; the rest is wide on purpose.
BOUNDS: Mapping[str, tuple[float, float]] = {
    "memory_efficiency": (0.2, 1.0),
    "compute_efficiency": (0.05, 1.0),
    "dense_layer_us": (1.0, 5000.0),
    "moe_layer_us": (1.0, 5000.0),
    "step_us": (1.0, 20000.0),
    "ttft_fixed_ms": (0.1, 5000.0),
    "ttft_prefill": (0.2, 10.0),
    "wave_share": (0.0, 1.0),
}


class Calibrated(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file: what `constants` were measured on, and how well they fit (`median_error`, 0.04 is 4%)."""

    model: str
    gpu: str
    layout: Parallel
    engine_version: str
    constants: Calibration
    n_points: int = 0
    median_error: float | None = None
    schema: int = SCHEMA


def read(text: str, name: str) -> Calibrated:
    """The calibration in a file's text; `name` is for messages.  Raises UserError."""
    hint = "Make it again with `penstock bench --calibrate`, or plan without --calibration."
    try:
        plain = msgspec.json.decode(text)
        schema = plain.get("schema") if isinstance(plain, dict) else None
        if schema != SCHEMA:
            raise UserError(
                f'cannot use calibration "{name}": schema {schema!r}, this version reads {SCHEMA}', hint=hint
            )
        calibrated = msgspec.convert(plain, Calibrated)
    except (msgspec.DecodeError, msgspec.ValidationError) as exc:
        raise UserError(f'cannot read calibration "{name}"', detail=str(exc), hint=hint) from exc
    for field, (low, high) in BOUNDS.items():
        value = getattr(calibrated.constants, field)
        if value is not None and not low <= value <= high:
            raise UserError(
                f'cannot use calibration "{name}": {field} is {value:g}', detail=f"From {low:g} to {high:g}.", hint=hint
            )
    spread = calibrated.constants.spread
    if spread is not None and not 0.1 <= spread[0] <= 1 <= spread[1] <= 10:
        raise UserError(f'cannot use calibration "{name}": spread is {spread}', hint=hint)
    return calibrated


def write(calibrated: Calibrated) -> str:
    """The file's text; numbers that were not measured are left out."""
    plain: dict[str, Any] = msgspec.to_builtins(calibrated)
    plain["constants"] = {key: value for key, value in plain["constants"].items() if value is not None}
    plain = {"schema": plain.pop("schema"), **plain}
    return msgspec.json.format(msgspec.json.encode(plain), indent=2).decode() + "\n"


def check(calibrated: Calibrated, models: Sequence[str], gpus: Sequence[str]) -> None:
    """Raises UserError for another model's or card's calibration. `models`, `gpus`: all names of what is planned.
    "meta-llama/Llama-3.1-8B", "llama-3.1-8b" and "/models/Llama-3.1-8B" are one model."""
    pairs = (("model", calibrated.model, models), ("GPU", calibrated.gpu, gpus))
    for what, theirs, ours in pairs:
        if _short(theirs) not in {_short(name) for name in ours}:
            raise UserError(
                f"cannot use this calibration: it was measured on {what} {theirs}, the plan is for {ours[0]}",
                hint="Plan without --calibration, or measure this deployment: `penstock bench --calibrate`.",
            )


def constants_for(calibrated: Calibrated, layout: Parallel, version: str) -> Calibration:
    """The constants, with wide ranges for another layout or engine than was measured."""
    if not differs(calibrated, layout, version):
        return calibrated.constants
    return msgspec.structs.replace(calibrated.constants, spread=WIDE_SPREAD)


def differs(calibrated: Calibrated, layout: Parallel, version: str) -> str:
    differences = []
    if layout != calibrated.layout:
        differences.append(f"layout {_named(calibrated.layout)} (planned: {_named(layout)})")
    if version.split(".")[:2] != calibrated.engine_version.split(".")[:2]:
        differences.append(f"vLLM {calibrated.engine_version} (planned: {version})")
    return " and ".join(differences)


def _short(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()


def _named(layout: Parallel) -> str:
    expert = " with expert parallelism" if layout.expert else ""
    return f"TP {layout.tensor} PP {layout.pipeline} DP {layout.data}{expert}"
