"""The gateway's config, made from a deployment and its plan."""

from __future__ import annotations

from pathlib import Path

import msgspec

from penstock.gateway.config import GatewayConfig, ServedModel, Slo
from penstock.observe import names as metrics
from penstock.planner import Plan
from penstock.run_folder import Run
from penstock.spec.deployment import Deployment
from penstock.spec.gateway import STDERR, GatewaySettings


def make(run: Run, deployment: Deployment, plan: Plan, listen: str, admin: str) -> GatewayConfig:
    """The whole config. Files that the deployment names are those of this machine. `listen`, `admin`: "host:port"."""
    spec, names = deployment.gateway, plan.served_names
    settings = {field: getattr(spec, field) for field in GatewaySettings.__struct_fields__} | {
        "store": spec.store if "://" in (spec.store or "") else _whole_path(spec.store) or str(run.store_file),
        "tls_cert": _whole_path(spec.tls_cert),
        "tls_key": _whole_path(spec.tls_key),
        "access_log": spec.access_log if spec.access_log == STDERR else _whole_path(spec.access_log),
        "upstreams": tuple(
            msgspec.structs.replace(upstream, key_file=_whole_path(upstream.key_file)) for upstream in spec.upstreams
        ),
    }
    return GatewayConfig(
        **settings,
        listen=listen,
        admin=admin,
        admin_token_file=str(run.admin_token_file),
        models=(ServedModel(names[0], tuple(names[1:])),),
        auth=spec.auth,
        engines_need_key=True,
        prices={} if spec.price is None else {names[0]: spec.price},
        deployment=deployment.name,
        slo=Slo(deployment.workload.ttft_ms, deployment.workload.tpot_ms),
        gpu_hour_usd=plan.gpu_hour_usd,
        engine_families=metrics.prefixes(),
        renamed={rename.old: rename.name for rename in metrics.renames()},
        gpus_per_replica=plan.layout.n_ranks if plan.device == "cuda" else 0,
    )


def _whole_path(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().resolve())
