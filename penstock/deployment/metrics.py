"""Where the metrics of a run are: the pages of its gateway, its Prometheus, and files for one elsewhere."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

from penstock import targets
from penstock.deployment import observe
from penstock.deployment.live import monitors
from penstock.errors import PenstockError
from penstock.observe import grafana, prometheus, rules
from penstock.observe.export import dashboards
from penstock.paths import write_atomically
from penstock.run_folder import Run
from penstock.spec.gateway import is_loopback

_PAGE_TIMEOUT_S = 30.0
_README = """Files for a Prometheus that watches "{name}": copy the jobs of prometheus.yml, or start one here:
  prometheus --config.file={folder}/prometheus.yml
scrape-key opens the pages of metrics and nothing else. Import the dashboards into Grafana or Google Cloud Monitoring.
"""


def page(run: Run, of_engines: bool) -> str:
    """The gateway's page of metrics, or the engines'.  Raises PenstockError when it does not answer."""
    with monitors(run, _PAGE_TIMEOUT_S) as gateways:
        return gateways[0].get_text("/metrics/engines" if of_engines else "/metrics")


def prometheus_url(run: Run) -> str:
    """Where the Prometheus of a run answers on this machine.  Raises PenstockError when there is none."""
    part = observe.now_state(run, time.time()).prometheus
    if part is None:
        raise _no_prometheus(run)
    if part.url is None or part.state == "gone":
        reason = part.note or (part.restarts[-1].reason if part.restarts else None)
        raise PenstockError(f'the Prometheus of "{run.name}" does not run', detail=reason, is_retryable=True)
    if part.note not in (None, socket.gethostname()):
        message = f'the Prometheus of "{run.name}" answers on loopback of {part.note} alone'
        hint = f"Ask there: ssh {part.note} penstock metrics ..."
        if not targets.load(run.record().target).shares_files:
            hint = "For a Prometheus of yours: penstock metrics --export DIR."
        raise PenstockError(message, hint=hint)
    return part.url


def _no_prometheus(run: Run) -> PenstockError:
    if run.is_ended():
        return PenstockError(f'no Prometheus watches "{run.name}": it is down')
    if not run.deployment().observe.prometheus:
        hint = "Set observe.prometheus: true and run `penstock up --replace`, or for one of yours: "
        return PenstockError(f'no Prometheus watches "{run.name}"', hint=f"{hint}penstock metrics --export DIR.")
    if run.places("controller") and not targets.load(run.record().target).shares_files:
        message = f'cannot ask about "{run.name}": the Prometheus of its cluster watches it'
        return PenstockError(message, hint="Ask there.")
    return PenstockError(f'the Prometheus of "{run.name}" has not started yet', is_retryable=True)


def export(run: Run, folder: Path) -> None:
    """All that a Prometheus elsewhere needs, in that folder.  Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    deployment, parts = run.deployment(), urlsplit(run.url)
    host, ca_file = parts.hostname or "", run.gateway_file().tls_cert
    is_near = is_loopback(host)
    if is_near and not is_loopback(run.listen.rpartition(":")[0].strip("[]")):  # it listens on all addresses
        host, is_near = socket.getfqdn(), False
    source = prometheus.Source(parts.scheme, None if is_near else ca_file, not is_near, parts.path)
    write_settings(run, folder, source)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    texts = {prometheus.TARGETS: prometheus.targets(deployment, [address])}
    texts |= {prometheus.DCGM_TARGETS: prometheus.dcgm_targets(deployment, ())}
    texts |= dashboards(deployment.name)
    texts |= {"README.md": _README.format(name=run.name, folder=folder)}
    _write(folder, texts)


def write_grafana(folder: Path, url: str) -> None:
    """The dashboards, and what points a Grafana of this machine at them and at the Prometheus at `url`."""
    _write(folder, grafana.provisioning(url, folder))


def _write(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / name, text.encode())


def write_settings(run: Run, folder: Path, source: prometheus.Source) -> None:
    """The configuration, the rules and the scrape key of a run, for a Prometheus that finds them in that folder."""
    deployment = run.deployment()
    write_atomically(folder / prometheus.SCRAPE_KEY, run.scrape_key().encode(), mode=0o600)
    write_atomically(folder / prometheus.RULES, rules.to_yaml(rules.groups(deployment)).encode())
    write_atomically(folder / prometheus.CONFIG, prometheus.config(deployment, folder, source).encode())
