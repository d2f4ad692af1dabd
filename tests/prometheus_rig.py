"""A real Prometheus for tests: it reads the given addresses twice a second, and answers PromQL."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from waiting import until

from penstock.hardware import network

Answer = list[tuple[dict[str, str], float]]


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, expr: str) -> Answer:
        """(labels, value) of each series now; NaN is no value."""
        query = urllib.parse.urlencode({"query": expr})
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query?{query}", timeout=10) as reply:
                data = json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expr}: {error.read().decode()}") from error
        rows = [(row["metric"], float(row["value"][1])) for row in data["result"]]
        return [row for row in rows if not math.isnan(row[1])]

    def wait(self, expr: str) -> Answer:
        """The first answer that is not empty."""
        return until(lambda: self.ask(expr), f"data for {expr}")


@contextlib.contextmanager
def prometheus(
    folder: Path, scrape_configs: list[dict[str, Any]], alerts: dict[str, str] | None = None
) -> Iterator[Prometheus]:
    """`alerts`: expressions by name."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    (port,) = network.free_lasting_ports(1)
    rules = [{"alert": name, "expr": expr} for name, expr in (alerts or {}).items()]
    (folder / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "alerts", "rules": rules}]}))
    config = folder / "prometheus.yml"
    facts = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(folder / "rules.yml")],
        "scrape_configs": scrape_configs,
    }
    config.write_text(yaml.safe_dump(facts))
    argv = [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", "--log.level=warn"]
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen([*argv, f"--web.listen-address=127.0.0.1:{port}"], stderr=log, stdout=log)
    try:
        found = Prometheus(f"http://127.0.0.1:{port}")
        until(lambda: child.poll() is not None or _is_ready(found.url), "Prometheus answers")
        assert child.poll() is None, (folder / "log").read_text()
        yield found
    finally:
        child.kill()
        child.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=1) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
