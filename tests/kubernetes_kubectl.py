"""The tests' kubectl: exec and port-forward by itself, since both need a kubelet's streaming; all else is the real one.

`kubernetes_kubectl.py REAL CONTAINERS words...`: CONTAINERS is the folder where the rig writes which process is which
container (NAMESPACE/POD/CONTAINER). Standard library only: it starts in 30 ms.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

VALUED = (
    "-n",
    "--namespace",
    "--context",
    "--kubeconfig",
    "-c",
    "--container",
    "--address",
    "--pod-running-timeout",
    "--user",
)


def main() -> int:
    real, containers, words = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    flags, rest, command = parse(words)
    if not rest or rest[0] not in ("exec", "port-forward"):
        os.execv(real, [real, *words])
    verb, target, *ports = rest
    shared = ("--context", "--kubeconfig", "--namespace", "--user")
    asked = [real, *(f"{name}={flags[name]}" for name in shared if name in flags)]
    try:
        namespace, pod, service = find(asked, target)
    except subprocess.CalledProcessError as error:
        sys.stderr.write(error.stderr)
        return 1
    if pod is None:
        sys.stderr.write("error: unable to forward port because pod is not running. Current status=Pending\n")
        return 1
    folder = containers / namespace / pod["metadata"]["name"]
    if verb == "exec":
        return execute(folder, pod, flags.get("--container"), command)
    return forward(folder, pod, service, ports, flags.get("--address", "127.0.0.1"))


def parse(words: list[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """(flags with values, words without flags, the command after "--")."""
    command: list[str] = []
    if "--" in words:
        at = words.index("--")
        words, command = words[:at], words[at + 1 :]
    long = {"-n": "--namespace", "-c": "--container"}
    flags, rest = {}, []
    queue = iter(words)
    for word in queue:
        name, sign, value = word.partition("=")
        if name in VALUED:
            flags[long.get(name, name)] = value if sign else next(queue)
        elif not word.startswith("-"):
            rest.append(word)
    return flags, rest, command


def ask(argv: list[str]) -> Any:
    return json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)


def find(kubectl: list[str], target: str) -> tuple[str, Any, Any]:
    """(namespace, a running pod or None, the service or None) of NAME, pod/NAME, svc/NAME or deployment/NAME."""
    kind, _, name = target.rpartition("/")
    found = ask([*kubectl, "get", kind or "pod", name, "-o", "json"])
    namespace = found["metadata"]["namespace"]
    if found["kind"] == "Pod":
        return namespace, found if found["status"].get("phase") == "Running" else None, None
    spec = found["spec"]
    labels = spec["selector"] if found["kind"] == "Service" else spec["selector"]["matchLabels"]
    selector = ",".join(f"{key}={value}" for key, value in labels.items())
    pods = ask([*kubectl, "get", "pods", "-l", selector, "-o", "json"])["items"]
    alive = [
        pod for pod in pods if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
    ]
    alive.sort(key=lambda pod: not is_ready(pod))
    return namespace, alive[0] if alive else None, found if found["kind"] == "Service" else None


def is_ready(pod: Any) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", []))


def execute(folder: Path, pod: Any, container: str | None, command: list[str]) -> int:
    name = container or pod["spec"]["containers"][0]["name"]
    try:
        outer = json.loads((folder / name).read_text("utf-8"))["pid"]
        pid = Path(f"/proc/{outer}/task/{outer}/children").read_text("utf-8").split()[0]
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    except (OSError, IndexError):
        sys.stderr.write(f'error: unable to upgrade connection: container not found ("{name}")\n')
        return 1
    env = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    argv = ["nsenter", "-t", pid, "--net", "--uts", "--ipc", "--mount", "--pid", "--", *command]
    code = subprocess.run(argv, env={"PATH": os.environ["PATH"]} | env).returncode
    if code:
        sys.stderr.write(f"command terminated with exit code {code}\n")
    return code


def forward(folder: Path, pod: Any, service: Any, ports: list[str], address: str) -> int:
    """Until the pod is gone."""
    listeners = []
    for words in ports:
        local, sign, remote = words.partition(":")
        far = port_of(pod, service, remote or local)
        listener = socket.create_server((address, int(local or 0) if sign else int(local)))
        listeners.append(listener)
        print(f"Forwarding from {address}:{listener.getsockname()[1]} -> {far}", flush=True)
        threading.Thread(target=accept, args=(listener, (pod["status"]["podIP"], far)), daemon=True).start()
    while folder.is_dir():
        time.sleep(0.2)
    sys.stderr.write("error: lost connection to pod\n")
    return 1


def port_of(pod: Any, service: Any, port: str) -> int:
    """The container's port of a port's number or name, of the service where there is one."""
    named: dict[Any, Any] = {}
    for container in pod["spec"]["containers"]:
        named |= {one["name"]: one["containerPort"] for one in container.get("ports", []) if "name" in one}
    if service is not None:
        for one in service["spec"]["ports"]:
            if port in (str(one["port"]), one.get("name")):
                target = one.get("targetPort", one["port"])
                return int(named.get(target, target))
        sys.exit(f"error: Service {service['metadata']['name']} does not have a service port {port}")
    return int(named.get(port, port))


def accept(listener: socket.socket, place: tuple[str, int]) -> None:
    while True:
        near, _ = listener.accept()
        print(f"Handling connection for {listener.getsockname()[1]}", flush=True)
        try:
            far = socket.create_connection(place, timeout=10)
        except OSError as error:
            sys.stderr.write(f"E an error occurred forwarding {listener.getsockname()[1]} -> {place[1]}: {error}\n")
            sys.stderr.write("error: lost connection to pod\n")
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
