"""etcd, API server, controller manager and scheduler of a test cluster (kubernetes_cluster.py), as local processes."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

from waiting import until

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "kubernetes" / "1.20.2-1.37"
API_PORT = 6443
ADMIN = "admin"
# Users without rights until a test binds a role to them; the token of each is NAME-token.
USERS = ("alice", "bob")
# How soon the cluster notices and reacts; real clusters take 40 s and 300 s.
NODE_GRACE_S = 10  # without a heartbeat a node is NotReady
EVICTION_S = 5  # then its pods are deleted, where they tolerate no longer


class ControlPlane:
    """The four processes on one address of this machine; its ports are the usual ones."""

    def __init__(self, base: Path, address: str, services: str, note: Callable[[int], None]) -> None:
        """`services`: the network of cluster IPs; `note`: told each process that is started."""
        self.base, self.address, self.services, self._note = base, address, services, note
        self.url = f"https://{address}:{API_PORT}"
        self.certificate, self.key = base / "keys" / "tls.crt", base / "keys" / "tls.key"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        self._write_keys()
        self.write_kubeconfig(self.base / "admin.kubeconfig", ADMIN, "default")
        etcd, data = f"http://{self.address}:2379", str(self.base / "etcd")
        peers = f"http://{self.address}:2380"
        self._spawn(
            "etcd",
            ["etcd", "--unsafe-no-fsync", "--data-dir", data, "--listen-client-urls", etcd, "--advertise-client-urls"]
            + [etcd, "--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
            + ["--initial-cluster", f"default={peers}", "--log-level", "warn"],
        )
        self.start_api()
        own = ["--kubeconfig", str(self.base / "admin.kubeconfig"), "--leader-elect=false", "--port=0"]
        own += ["--secure-port=0", "--kube-api-qps=200", "--kube-api-burst=400"]
        self._spawn("scheduler", [str(CACHE / "kube-scheduler"), *own])
        self._spawn(
            "controller-manager",
            [str(CACHE / "kube-controller-manager"), *own, f"--service-account-private-key-file={self.key}"]
            + [f"--root-ca-file={self.certificate}", f"--node-monitor-grace-period={NODE_GRACE_S}s"]
            + ["--node-monitor-period=1s", "--node-startup-grace-period=10s", "--pvclaimbinder-sync-period=2s"]
            + ["--node-eviction-rate=10", "--unhealthy-zone-threshold=0.99", "--pod-eviction-timeout=1s"]
            + ["--horizontal-pod-autoscaler-sync-period=1s"],
        )

    def start_api(self) -> None:
        key, cert = str(self.key), str(self.certificate)
        issuer = "https://kubernetes.default.svc.cluster.local"
        self._spawn(
            "apiserver",
            [str(CACHE / "kube-apiserver"), f"--etcd-servers=http://{self.address}:2379", "--insecure-port=0"]
            + [f"--bind-address={self.address}", f"--advertise-address={self.address}", f"--secure-port={API_PORT}"]
            + [f"--tls-cert-file={cert}", f"--tls-private-key-file={key}", "--authorization-mode=RBAC"]
            + [f"--token-auth-file={self.base / 'keys' / 'tokens.csv'}", "--allow-privileged=true"]
            + [f"--service-account-issuer={issuer}", f"--api-audiences={issuer}"]
            + [f"--service-account-key-file={cert}", f"--service-account-signing-key-file={key}"]
            + [f"--service-cluster-ip-range={self.services}", f"--kubelet-certificate-authority={cert}"]
            + ["--kubelet-preferred-address-types=InternalIP", "--profiling=false"]
            + [f"--default-not-ready-toleration-seconds={EVICTION_S}"]
            + [f"--default-unreachable-toleration-seconds={EVICTION_S}"],
        )
        self._wait_for_api()

    def stop_api(self, hangs: bool) -> None:
        api = self._processes["apiserver"]
        api.send_signal(signal.SIGSTOP if hangs else signal.SIGKILL)
        if not hangs:
            api.wait()

    def resume_api(self) -> None:
        api = self._processes["apiserver"]
        if api.poll() is None:
            api.send_signal(signal.SIGCONT)
        else:
            self.start_api()

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()

    def write_kubeconfig(self, path: Path, user: str, namespace: str, token: str | None = None) -> None:
        """A file with the context "test": a user of this cluster, in a namespace."""
        cluster = {"server": self.url, "certificate-authority": str(self.certificate)}
        context = {"cluster": "test", "user": user, "namespace": namespace}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": token or f"{user}-token"}}],
            "contexts": [{"name": "test", "context": context}],
            "current-context": "test",
        }
        path.write_text(json.dumps(config), "utf-8")
        path.chmod(0o600)

    def _write_keys(self) -> None:
        folder = self.base / "keys"
        folder.mkdir()
        gateway = self.services.rpartition(".")[0] + ".1"
        names = "DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:localhost,DNS:*.node"
        network = self.address.rpartition(".")[0]
        addresses = [self.address, gateway, "127.0.0.1", *(f"{network}.{i}" for i in range(2, 10))]
        openssl = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        openssl += ["-days", "2", "-keyout", str(self.key), "-out", str(self.certificate), "-subj", "/CN=penstock-test"]
        openssl += ["-addext", f"subjectAltName={names},{','.join(f'IP:{one}' for one in addresses)}"]
        subprocess.run(openssl, check=True, capture_output=True)
        rows = [f'{ADMIN}-token,{ADMIN},{ADMIN},"system:masters"', *(f"{user}-token,{user},{user}" for user in USERS)]
        (folder / "tokens.csv").write_text("\n".join(rows) + "\n", "utf-8")

    def _spawn(self, name: str, argv: list[str]) -> None:
        with (self.base / "log" / f"{name}.log").open("ab") as log:
            env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(self.base)}
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True, cwd=self.base
            )
        self._processes[name] = process
        self._note(process.pid)

    def _wait_for_api(self) -> None:
        context = ssl.create_default_context(cafile=str(self.certificate))

        def answers() -> bool:
            log = (self.base / "log" / "apiserver.log").read_text("utf-8", "replace")[-3000:]
            assert self._processes["apiserver"].poll() is None, f"the API server does not start: {log}"
            connection = http.client.HTTPSConnection(self.address, API_PORT, context=context, timeout=5)
            with contextlib.suppress(OSError), contextlib.closing(connection):
                connection.request("GET", "/readyz")
                return connection.getresponse().status == 200
            return False

        until(answers, "the API server answers")


def missing_programs() -> list[str]:
    """Programs that are not installed; `make kubernetes` brings them."""
    absent = [name for name in ("etcd", "openssl") if not shutil.which(name)]
    built = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
    return absent + [name for name in built if not (CACHE / name).exists()]
