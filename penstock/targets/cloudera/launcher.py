"""Launches the nodes of a deployment as workers, in the kernel of its application: `cml.workers_v1` is only there.

Standard library only, as start.py, which runs it. Which workers shall be: handle.json, {"replica/0": {"workers":
[NAME, NAME]}}, one name a rank, new for each launch. Which there are: workers.json, by name. Workers end with the
application that launched them, so those of an earlier start are gone.
https://docs.cloudera.com/machine-learning/cloud/distributed-computing/topics/ml-workers-api.html
"""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

_LOOK_S = 2.0
_OVER = ("failed", "succeeded", "stopped", "timedout")
_ORPHANED = "ended with the application that launched it, which was started again"
_NO_MODULE = "the application's runtime has no cml.workers_v1: take a PBJ runtime (cloudera.runtime), or nodes: jobs"


class Launcher:
    """`step` brings about what the handle names. `api`: the module cml.workers_v1, None to import it."""

    def __init__(self, run: Path, say: Callable[[str], None], api: Any = None) -> None:
        self._run, self._say, self._api = run, say, api
        self._looked_at, self._written = 0.0, ""
        self.workers: dict[str, dict[str, Any]] = _read(run / "workers.json")
        for worker in self.workers.values():
            if worker["status"] not in _OVER:
                worker.update(status="failed", reason=_ORPHANED)
        (run / "workers.end").unlink(missing_ok=True)
        self._write()

    def step(self) -> None:
        """Stop what is not named, launch what is new, note what became of the others."""
        replicas = self._wanted()
        if replicas is None:
            return  # a handle that is being written, or is damaged
        kept = {name for names in replicas.values() for name in names}
        living = {name: worker for name, worker in self.workers.items() if worker["status"] not in _OVER}
        for replica, names in replicas.items():
            self._launch(replica, names)
        self._stop([worker for name, worker in living.items() if name not in kept])
        self._stop([worker for worker in self.workers.values() if worker.get("leaves")])
        self.workers = {name: worker for name, worker in self.workers.items() if name in kept or name in living}
        self._look()
        self._write()

    def _wanted(self) -> dict[str, list[str]] | None:
        if (self._run / "workers.end").exists():
            return {}
        units = _read(self._run / "handle.json").get("units")
        if not isinstance(units, dict):
            return None
        replicas = {key.partition("/")[2]: entry for key, entry in units.items() if key.startswith("replica/")}
        return {replica: list(entry.get("workers", ())) for replica, entry in replicas.items()}

    def _launch(self, replica: str, names: Sequence[str]) -> None:
        """All new workers of a replica. When one is refused, the others are stopped: a part holds GPUs for nothing."""
        new = [(rank, name) for rank, name in enumerate(names) if name not in self.workers]
        refusal: str | None = None
        for rank, name in new:
            now = datetime.now(timezone.utc).isoformat()  # noqa: UP017 - a runtime may have any Python
            worker = self.workers[name] = {"status": "starting", "launched_at": now}
            if refusal is None:
                try:
                    worker["id"] = self._launched(replica, rank, name)
                    continue
                except Exception as exc:  # noqa: BLE001 - whatever the module raises is the reason
                    self._say(f"worker {rank} of replica {replica} was not launched: {exc}")
                    refusal, reason = f"worker {rank} was refused", f"was not launched: {exc}"
            else:
                reason = f"was not launched: {refusal}"
            worker.update(status="failed", reason=reason)
        if refusal is not None:
            for worker in (self.workers[name] for _, name in new):
                if worker["status"] == "starting":
                    worker.update(leaves=True, reason=refusal)

    def _launched(self, replica: str, rank: int, name: str) -> str:
        text = (self._run / "artifact" / "node.json").read_text("utf-8")
        body = json.loads(text.replace("{replica}", replica).replace("{rank}", str(rank)))
        options = {"cpu": body["cpu"], "memory": body["memory"], "nvidia_gpu": body.get("nvidia_gpu", 0)}
        label = body.get("accelerator_label_id")
        if label is not None:
            options["accelerator_label_id"] = int(label)
        env = {key: value for key, value in body["environment"].items() if key != "JOB_MAXIMUM_MINUTES"}
        launch = self._module().launch_workers
        known = inspect.signature(launch).parameters
        lacking = sorted(options.keys() - known.keys())
        if lacking:
            raise RuntimeError(f"this workbench's launch_workers takes no {', '.join(lacking)}: nodes: jobs can")
        if "name" in known:
            options["name"] = f"{env['PENSTOCK_UNIT']} of {self._run.name}"
        env["PENSTOCK_WORKER"] = name
        rows = launch(1, script=body["script"], env=env, **options)
        row = rows[0] if rows else {}
        if not row.get("id"):
            raise RuntimeError(str(row.get("message") or "the workbench gave no reason"))
        return str(row["id"])

    def _stop(self, workers: Sequence[Mapping[str, Any]]) -> None:
        """By id: without one the module stops all workers of the application. Again at each step, until it is over."""
        for worker in workers:
            if worker.get("id") and worker["status"] not in _OVER:
                try:
                    self._module().stop_workers(worker["id"])
                except Exception as exc:  # noqa: BLE001 - it is tried again
                    self._say(f"could not stop worker {worker['id']}: {exc}")

    def _look(self) -> None:
        living = [worker for worker in self.workers.values() if worker["status"] not in _OVER]
        if not living or time.monotonic() - self._looked_at < _LOOK_S:
            return
        self._looked_at = time.monotonic()
        try:
            rows = {str(row.get("id")): row for row in self._module().list_workers()}
        except Exception as exc:  # noqa: BLE001 - what is not told has not changed
            self._say(f"could not list workers: {exc}")
            return
        for worker in living:
            row: Mapping[str, Any] | None = rows.get(worker.get("id", ""))
            if row is None:
                worker.update(status="failed", reason="is not in the workbench's list of workers any more")
            else:
                worker["status"] = str(row.get("status") or worker["status"]).lower()

    def _module(self) -> Any:
        if self._api is None:
            try:
                import cml.workers_v1 as api  # type: ignore[import-not-found,unused-ignore]
            except ImportError as exc:
                raise RuntimeError(_NO_MODULE) from exc
            self._api = api
        return self._api

    def _write(self) -> None:
        text = json.dumps(self.workers)
        if text != self._written:
            new = self._run / f".workers.{os.getpid()}"
            new.write_text(text)
            new.rename(self._run / "workers.json")
            self._written = text


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
