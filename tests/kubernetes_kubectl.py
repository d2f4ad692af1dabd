"""The tests' kubectl: exec and port-forward by itself, since both need a kubelet's streaming; all else is the real one.

`kubernetes_kubectl.py REAL CONTAINERS words...`: CONTAINERS is the folder where the rig writes which process is which
container (NAMESPACE/POD/CONTAINER). Standard library only: it starts in 40 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any


def main() -> int:
    real, containers, words = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    if not {"exec", "port-forward"} & {*words}:
        os.execv(real, [real, *words])
    at = words.index("--") if "--" in words else len(words)
    options = parser().parse_args(words[:at])
    place = {name: getattr(options, name) for name in ("context", "namespace")}
    kubectl = [real, *(f"--{name}={value}" for name, value in place.items() if value)]
    target = options.target if "/" in options.target else f"pod/{options.target}"
    try:
        found = ask([*kubectl, "get", target])
        pod = found if found["kind"] == "Pod" else pod_of(kubectl, found["spec"]["selector"])
    except subprocess.CalledProcessError as error:
        sys.stderr.write(error.stderr)
        return 1
    if pod is None or pod["status"].get("phase") != "Running":
        sys.stderr.write("error: unable to forward port because pod is not running. Current status=Pending\n")
        return 1
    folder = containers / pod["metadata"]["namespace"] / pod["metadata"]["name"]
    if options.verb == "exec":
        return execute(folder / (options.container or pod["spec"]["containers"][0]["name"]), words[at + 1 :])
    near, far = map(int, options.port.split(":"))
    return forward(folder, near, (pod["status"]["podIP"], port_of(pod, found, far)))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kubectl")
    for names in (["--context"], ["--namespace"], ["--container", "-c"], ["--address"], ["--pod-running-timeout"]):
        parser.add_argument(*names)
    parser.add_argument("-i", "-it", action="store_true")
    parser.add_argument("verb")
    parser.add_argument("target", help="NAME of a pod, or KIND/NAME")
    parser.add_argument("port", nargs="?", help="NEAR:FAR")
    return parser


def ask(argv: list[str]) -> Any:
    return json.loads(subprocess.run([*argv, "-o", "json"], capture_output=True, text=True, check=True).stdout)


def pod_of(kubectl: list[str], selector: dict[str, Any]) -> Any:
    """One that runs, of a Service or a Deployment, better a ready one; None where there is none."""
    labels = ",".join(f"{key}={value}" for key, value in selector.get("matchLabels", selector).items())
    pods = ask([*kubectl, "get", "pods", "-l", labels, "--field-selector=status.phase=Running"])["items"]
    alive = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    return max(alive, key=is_ready, default=None)


def is_ready(pod: Any) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", []))


def port_of(pod: Any, service: Any, port: int) -> int:
    """The container's port of a service's port."""
    named = {one["name"]: one["containerPort"] for each in pod["spec"]["containers"] for one in each.get("ports", [])}
    [target] = [one["targetPort"] for one in service["spec"]["ports"] if one["port"] == port]
    return int(named.get(target, target))


def execute(container: Path, command: list[str]) -> int:
    try:
        outer = container.read_text("utf-8")
        pid = Path(f"/proc/{outer}/task/{outer}/children").read_text("utf-8").split()[0]
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    except (OSError, IndexError):
        sys.stderr.write(f'error: unable to upgrade connection: container not found ("{container.name}")\n')
        return 1
    env = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    argv = ["nsenter", "-t", pid, "--net", "--uts", "--ipc", "--mount", "--pid", "--", *command]
    code = subprocess.run(argv, env={"PATH": os.environ["PATH"]} | env).returncode
    if code:
        sys.stderr.write(f"command terminated with exit code {code}\n")
    return code


def forward(folder: Path, near: int, place: tuple[str, int]) -> int:
    """Until the pod is gone."""
    listener = socket.create_server(("127.0.0.1", near))
    print(f"Forwarding from 127.0.0.1:{near} -> {place[1]}", flush=True)
    threading.Thread(target=accept, args=(listener, place), daemon=True).start()
    while folder.is_dir():
        time.sleep(0.2)
    sys.stderr.write("error: lost connection to pod\n")
    return 1


def accept(listener: socket.socket, place: tuple[str, int]) -> None:
    while True:
        near, _ = listener.accept()
        print(f"Handling connection for {listener.getsockname()[1]}", flush=True)
        try:
            far = socket.create_connection(place, timeout=10)
        except OSError as error:
            sys.stderr.write(f"E an error occurred forwarding to {place[1]}: {error}\nerror: lost connection to pod\n")
            sys.stderr.flush()
            os._exit(1)
        far.settimeout(None)
        for pair in ((near, far), (far, near)):
            threading.Thread(target=copy, args=pair, daemon=True).start()


def copy(source: socket.socket, sink: socket.socket) -> None:
    try:
        while chunk := source.recv(65536):
            sink.sendall(chunk)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        for one in (source, sink):
            one.close()


if __name__ == "__main__":
    sys.exit(main())
