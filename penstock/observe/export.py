"""Dashboards and what else other monitoring systems take, as files. Pure."""

from __future__ import annotations

import json

from penstock.observe import google, grafana


def dashboards(deployment: str) -> dict[str, str]:
    """Text by file name: `grafana/*.json` for any deployment, `google/operations.json` for this one."""
    board = json.dumps(google.dashboard(deployment), indent=1, ensure_ascii=False) + "\n"
    return {f"grafana/{name}": text for name, text in grafana.files().items()} | {"google/operations.json": board}
