"""A real Ray on hosts (hosts.py): the head on the first node, one `ray start --block` per node, pretended GPUs.

Every port is Ray's usual one: each host has its own, and its own /tmp/ray. Nothing calls `ray stop`, which ends every
Ray it can see: the started processes get signals.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from hosts import PATH, Host, HostProcess, Hosts, Inside
from waiting import end, until

GCS_PORT, DASHBOARD_PORT = 6379, 8265
# By default Ray 2.60 believes in a node without power for over a minute (seen: more than 60 s).
QUICK_HEALTH = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}
OBJECT_STORE_BYTES = 100_000_000
CPUS, GPUS = 2, 1  # that each node claims
# Asks the dashboard from the host itself: behind a login this process cannot.
FETCH = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[2], method=sys.argv[1], data=sys.argv[3].encode() or None)
request.add_header("Content-Type", "application/json")
print(urllib.request.urlopen(request, timeout=10).read().decode())
"""


def missing_ray() -> str | None:
    """Why there can be no Ray here, beyond what hosts need; None where there can."""
    return None if importlib.util.find_spec("ray") else "the package ray is not installed (`make vllm-cpu` installs it)"


def _is_ray(process: HostProcess) -> bool:
    """Ray's programs and the titles that they give themselves: "ray::IDLE", "ray-dashboard-JobHead-0 (...)"."""
    return any("/ray/" in word or word.startswith(("ray::", "ray-")) for word in process.argv)


class RayCluster:
    """A Ray on all nodes of `hosts`. Ready when the constructor returns; `close` ends it, and so do its hosts."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts, self.head = hosts, hosts[0]
        self.env = {
            "PATH": f"{Path(sys.executable).parent}:{PATH}",
            "RAY_USAGE_STATS_ENABLED": "0",
            # A raylet that gets SIGTERM drains for up to 30 s.
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            **QUICK_HEALTH,
        }
        self.url = f"http://{self.head.address}:{DASHBOARD_PORT}"
        self._started: dict[str, Inside] = {}
        self.start()

    def start(self) -> None:
        """Start Ray where it does not run, and wait until every node is in the cluster."""
        for node in self.hosts:
            if node.name not in self._started or self._started[node.name].poll() is not None:
                self._started[node.name] = self._start(node)
                if node is self.head:
                    self._wait_for(1)
        self._wait_for(len(self.hosts))

    def stop(self, node: Host) -> None:
        """End Ray on one node as its operator would: SIGTERM to what `ray start --block` became. Blocks until then."""
        process = self._started.pop(node.name)
        if not node.is_on:
            return
        process.terminate()
        end(process)
        # The dashboard's parts would notice after a while that it has gone.
        for pid in [found.outer_pid for found in node.processes() if _is_ray(found)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not any(map(_is_ray, node.processes())), f"nothing of Ray is left on {node.name}")

    def close(self) -> None:
        """End Ray everywhere, the head last. Idempotent."""
        for node in reversed(list(self.hosts)):
            if node.name in self._started:
                self.stop(node)

    def fetch(self, path: str, method: str = "GET", body: object = None) -> Any:
        """An answer of the dashboard's HTTP API. AssertionError if it is none."""
        sent = "" if body is None else json.dumps(body)
        words = [sys.executable, "-I", "-S", "-c", FETCH, method, self.url + path, sent]
        return json.loads(self.head.run(words).stdout)

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes that Ray thinks alive."""
        found = self.fetch("/api/v0/nodes")["data"]["result"]["result"]
        return [node for node in found if node["state"] == "ALIVE"]

    def clear(self) -> None:
        """As new for the next test: all nodes there, no job or actor of another test; started again if need be."""
        self.hosts.heal()
        if not self._is_as_new():
            self.close()
            self.hosts.reset()
            self.start()

    def _is_as_new(self) -> bool:
        if any(process.poll() is not None for process in self._started.values()):
            return False
        actors = self.fetch("/api/v0/actors")["data"]["result"]["result"]
        jobs = self.fetch("/api/jobs/")
        if any(job["status"] not in ("SUCCEEDED", "FAILED", "STOPPED") for job in jobs):
            return False
        for number in [job["submission_id"] for job in jobs if job["submission_id"]]:  # drivers have none
            self.fetch(f"/api/jobs/{number}", "DELETE")
        return len(self._started) == len(self.nodes()) == len(self.hosts) and all(
            actor["state"] == "DEAD" for actor in actors
        )

    def _start(self, node: Host) -> Inside:
        where = (
            ["--head", f"--port={GCS_PORT}", "--dashboard-host=0.0.0.0", "--include-dashboard=true"]
            if node is self.head
            else [f"--address={self.head.address}:{GCS_PORT}"]
        )
        what = [
            f"--node-ip-address={node.address}",  # Ray may choose 127.0.0.1
            f"--num-cpus={CPUS}",
            f"--num-gpus={GPUS}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
        ]
        with node.log("ray").open("a") as log:
            return node.popen(["ray", "start", *where, *what, "--block"], env=self.env, stdout=log, stderr=log)

    def _wait_for(self, count: int) -> None:
        def are_there() -> bool:
            for name, process in self._started.items():
                assert process.poll() is None, f"Ray ended on {name}: {self.hosts[name].log('ray').read_text('utf-8')}"
            try:
                return self.head.listens(DASHBOARD_PORT) and len(self.nodes()) >= count
            except AssertionError:  # the dashboard listens before it answers
                return False

        until(are_there, f"Ray has {count} nodes")
