"""What a Prometheus needs to watch a deployment: its configuration, its targets, its command line. Pure.

All of it lies in one folder. Prometheus reads the files of targets again by itself, so that the configuration stays
as it is while gateways move: https://prometheus.io/docs/prometheus/latest/configuration/configuration/#file_sd_config
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.spec.deployment import Deployment, Observe
from penstock.wire.announcement import MachineReading

PROGRAM = "prometheus"
INSTALL = "Debian and Ubuntu: apt-get install prometheus"
CONFIG, RULES, TARGETS, DCGM_TARGETS = "prometheus.yml", "rules.yml", "targets.json", "dcgm.json"
SCRAPE_KEY, DATA = "scrape-key", "data"

INTERVAL_S = 5
# What one scrape may bring: a replica that writes 100 MB, or a label for each request, costs its own series only.
_BODY, _SAMPLES, _LABELS, _LABEL_CHARS = "64MB", 500_000, 64, 4096


class Source(msgspec.Struct, frozen=True):
    """How Prometheus reaches the gateway. `is_checked`: its certificate is verified; `ca_file` is what by. `prefix`: of
    its paths."""

    scheme: str = "http"
    ca_file: str | None = None
    is_checked: bool = True
    prefix: str = ""


def config(deployment: Deployment, folder: Path, source: Source) -> str:
    """prometheus.yml. `folder`: where this and the other files lie, an absolute path."""
    import yaml

    facts: dict[str, Any] = {
        "global": {"scrape_interval": f"{INTERVAL_S}s", "scrape_timeout": f"{INTERVAL_S}s"},
        "rule_files": [str(folder / RULES)],
        "scrape_configs": [
            _job("penstock", "/metrics", folder, source),
            _job("engines", "/metrics/engines", folder, source),
            _dcgm(folder),
        ],
    }
    if (remote := deployment.observe.remote_write) is not None:
        facts["remote_write"] = [{"url": remote.url}]
        if remote.token_file is not None:
            facts["remote_write"][0]["authorization"] = {"credentials_file": str(Path(remote.token_file).expanduser())}
    return str(yaml.safe_dump(facts, sort_keys=False))


def _job(name: str, path: str, folder: Path, source: Source) -> dict[str, Any]:
    job: dict[str, Any] = {
        "job_name": name,
        "metrics_path": source.prefix + path,
        "honor_labels": True,  # series name the replica and the deployment that they are of
        "authorization": {"credentials_file": str(folder / SCRAPE_KEY)},
        "scheme": source.scheme,
        **_limits(),
        "file_sd_configs": [{"files": [str(folder / TARGETS)]}],
    }
    if source.scheme == "https":
        trust = {} if source.ca_file is None else {"ca_file": source.ca_file}
        job["tls_config"] = trust if source.is_checked else {"insecure_skip_verify": True}
    return job


def _dcgm(folder: Path) -> dict[str, Any]:
    """Exporters that other software runs: only their GPUs' series are taken, and no key is sent."""
    keep = {"source_labels": ["__name__"], "regex": "DCGM_FI_.*", "action": "keep"}
    return {
        "job_name": "dcgm",
        **_limits(),
        "file_sd_configs": [{"files": [str(folder / DCGM_TARGETS)]}],
        "metric_relabel_configs": [keep],
    }


def _limits() -> dict[str, Any]:
    return {
        "body_size_limit": _BODY,
        "sample_limit": _SAMPLES,
        "label_limit": _LABELS,
        "label_value_length_limit": _LABEL_CHARS,
    }


def targets(deployment: Deployment, addresses: Sequence[str]) -> str:
    """targets.json: the gateways, "host:port" each.

    A single one is called "gateway": its port is another after each `up`, and its series shall go on.
    """
    name = {"instance": "gateway"} if len(addresses) == 1 else {}
    return _file_sd([(sorted(addresses), _labels(deployment) | name)])


def dcgm_targets(deployment: Deployment, machines: Iterable[MachineReading]) -> str:
    """dcgm.json: the DCGM exporters that nodes found on their machines."""
    ports = {machine.host: machine.dcgm_port for machine in machines if machine.dcgm_port is not None}
    rows = [([f"{host}:{port}"], _labels(deployment) | {"node": host}) for host, port in sorted(ports.items())]
    return _file_sd(rows)


def _labels(deployment: Deployment) -> dict[str, str]:
    return {"deployment": deployment.name, "target": deployment.target}


def _file_sd(rows: Iterable[tuple[Sequence[str], dict[str, str]]]) -> str:
    return json.dumps([{"targets": [*addresses], "labels": labels} for addresses, labels in rows], indent=2) + "\n"


def argv(program: str, observe: Observe, folder: Path, port: int) -> list[str]:
    """The command line, for Prometheus 2 and 3. Nothing but queries is open: no reload, no end, no deletion by HTTP."""
    return [
        program,
        f"--config.file={folder / CONFIG}",
        f"--storage.tsdb.path={folder / DATA}",
        f"--storage.tsdb.retention.time={observe.retention}",
        f"--storage.tsdb.retention.size={observe.retention_size}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
