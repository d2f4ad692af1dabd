"""Ray under one replica: a private cluster with its own ports and folder, which ends with the replica.

Ray is started with `--block` and ended by its pid; `ray stop` would end every Ray on the machine. The check before vLLM
starts, `python -m penstock.node.group.ray ADDRESS N_NODES GPUS_EACH TIMEOUT_S`, requests the placement that vLLM will
request, prints it as JSON, and frees it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engines import Command
from penstock.hardware import detect
from penstock.hardware.network import free_port
from penstock.node.group.addresses import Formation
from penstock.planner import Plan
from penstock.text import MIB

# Ray's object store carries no tensors of vLLM's: the smallest that Ray takes is 75 MiB.
_OBJECT_STORE_BYTES = 100 * MIB
_PORTS = (
    *("--node-manager-port", "--object-manager-port", "--runtime-env-agent-port"),
    *("--dashboard-agent-grpc-port", "--dashboard-agent-listen-port", "--metrics-export-port"),
)
_POLL_S = 0.3
# Set where a proxy of the place leads to one port of this machine, and its address there.
_DASHBOARD_PORT, _DASHBOARD_URL = "PENSTOCK_RAY_DASHBOARD_PORT", "PENSTOCK_RAY_DASHBOARD_URL"
_TOKENS_SINCE = (2, 52)  # https://docs.ray.io/en/latest/ray-security/token-auth.html


def environment(formation: Formation, folder: str) -> dict[str, str]:
    """For Ray's processes and vLLM: only this cluster, no usage reports.

    The token is in the environment, which ends with the processes and only their user can read; a file would stay on
    the disk of a killed node.
    """
    return {
        "RAY_ADDRESS": f"{formation.head.address}:{formation.ray_port}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": formation.ray_token,
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


def asks_for_token() -> bool:
    """Whether the installed Ray refuses calls without the token: an older one ignores the variables."""
    version = detect.versions().get("ray", "0.0")
    return tuple(int(part) for part in version.split(".")[:2]) >= _TOKENS_SINCE


def dashboard_words() -> str | None:
    """Where the dashboard is for users, or why it is not there; None where no proxy leads to it."""
    if _DASHBOARD_URL not in os.environ:
        return None
    if asks_for_token():
        return f"Ray's dashboard: {os.environ[_DASHBOARD_URL]}"
    return f"Ray's dashboard is only on loopback: a Ray before {'.'.join(map(str, _TOKENS_SINCE))} asks for no token"


def start(plan: Plan, formation: Formation, rank: int, folder: str, base: Command) -> Command:
    """The Ray process of a node: the head on rank 0, else one that joins it. Workers get the environment of `base`."""
    node, n_gpus = formation.nodes[rank], plan.ranks_each
    argv = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    argv += ["--node-ip-address", node.address, "--temp-dir", folder, "--num-gpus", str(n_gpus)]
    argv += ["--num-cpus", str(n_gpus + 1), "--object-store-memory", str(_OBJECT_STORE_BYTES)]
    argv += ["--min-worker-port", "0", "--max-worker-port", "0", "--log-color", "false"]
    hosts = dict.fromkeys(_PORTS, node.address)
    if rank == 0:
        argv += ["--head", "--port", str(formation.ray_port), "--dashboard-host", plan.ray_dashboard_host]
        hosts |= {"--ray-client-server-port": node.address, "--dashboard-port": plan.ray_dashboard_host}
    else:
        argv += ["--address", f"{formation.head.address}:{formation.ray_port}"]
    taken = {formation.ray_port, formation.master_port}  # Ray refuses to start when two of its parts have one port
    for name, host in hosts.items():
        is_given = name == "--dashboard-port" and _DASHBOARD_PORT in os.environ and asks_for_token()
        port = int(os.environ[_DASHBOARD_PORT]) if is_given else free_port(host, taken)
        taken.add(port)
        argv += [name, str(port)]
    env = {**base.defaults, **base.env, **environment(formation, folder)}
    del env["RAY_ADDRESS"]  # `ray start` takes flags, and refuses a head with this variable
    return Command(tuple(argv), env, base.files, links=base.links)


def check(address: str, n_nodes: int, gpus_each: int, timeout_s: float) -> Command:
    """The check before vLLM starts, in another process: the node does not import Ray."""
    argv = [sys.executable, "-m", "penstock.node.group.ray", address, str(n_nodes), str(gpus_each), str(timeout_s)]
    return Command(tuple(argv))


def placement(output: str) -> dict[str, Any]:
    """The check's answer from its output: {"hosts": [address of each rank]} or {"problem": why}."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            answer: dict[str, Any] = json.loads(line)
            return answer
    return {"problem": "the check of Ray's placement printed nothing:\n" + "\n".join(output.splitlines()[-10:])}


def _check(address: str, n_nodes: int, gpus_each: int, timeout_s: float) -> dict[str, Any]:
    import ray
    from ray.util import placement_group, placement_group_table, remove_placement_group

    deadline = time.monotonic() + timeout_s
    ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    try:
        while True:
            alive = [node for node in ray.nodes() if node["Alive"]]
            short = [node for node in alive if node["Resources"].get("GPU", 0) < gpus_each]
            if len(alive) >= n_nodes and not short:
                break
            if time.monotonic() > deadline:
                return {"problem": _why_short(alive, n_nodes, gpus_each, timeout_s)}
            time.sleep(_POLL_S)
        group = placement_group([{"GPU": 1.0}] * (n_nodes * gpus_each), strategy="PACK")
        if not group.wait(max(1.0, deadline - time.monotonic())):
            return {"problem": f"Ray cannot place {n_nodes * gpus_each} ranks: {ray.available_resources()}"}
        where = placement_group_table(group)["bundles_to_node_id"]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in alive}
        hosts = [addresses.get(where[index], "?") for index in sorted(where)]
        remove_placement_group(group)
        return {"hosts": hosts}
    finally:
        ray.shutdown()


def _why_short(alive: Sequence[Mapping[str, Any]], n_nodes: int, gpus_each: int, timeout_s: float) -> str:
    nodes = ", ".join(f"{n['NodeManagerAddress']} with {n['Resources'].get('GPU', 0):.0f} GPUs" for n in alive)
    return f"Ray shows {nodes or 'no node'} after {timeout_s:.0f} s; {n_nodes} nodes with {gpus_each} each are needed"


def main(argv: Sequence[str]) -> int:
    address, n_nodes, gpus_each, timeout_s = argv
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        answer = _check(address, int(n_nodes), int(gpus_each), float(timeout_s))
    except (RuntimeError, ConnectionError, TimeoutError, ValueError, OSError, ImportError) as exc:
        answer = {"problem": f"could not reach Ray at {address}: {' '.join(str(exc).split())[:400]}"}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 1 if "problem" in answer else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
