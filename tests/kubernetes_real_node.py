"""A real node of a test cluster: kubelet 1.20.2, containerd and runc, in namespaces of their own.

    with Cluster(0) as cluster:
        node = RealNode(cluster)                         # about 12 s
        with cluster.namespace() as space:
            ...                                          # pods of the image kubernetes_real_image.IMAGE
            node.control_group(space.pod("web-0"), "web")

One bash is the first process of a process table, a mount and a cgroup namespace that kubelet, containerd and all
containers share, so its death ends everything, and no mount, file in /run, /var/lib or /var/log nor kernel setting of
this machine is changed. Only cables of pods on the cluster's bridge and the control groups are outside; the janitor
removes them. The control plane, the name server, the relays of cluster IPs and the volumes are the cluster's.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hosts import MACHINES
from hosts_janitor import note, note_pid
from kubernetes_api import ApiError
from kubernetes_cluster import Cluster, Pod
from kubernetes_control_plane import ADMIN, CACHE
from kubernetes_kubelet import KUBELET_PORT
from kubernetes_real_image import BUSYBOX, IMAGE, write_image
from waiting import until

NAME = "node-1"
PLUGINS = Path("/usr/lib/cni")
# What the kubelet sets on its machine: https://github.com/kubernetes/kubernetes/blob/v1.20.2/pkg/util/sysctl/sysctl.go
KERNEL = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
JOIN = """\
set -e
for group in {groups}; do echo $$ >$group/cgroup.procs; done
exec unshare --mount --pid --cgroup --fork --kill-child --mount-proc bash {folder}/node.sh
"""
NODE = (MACHINES / "node.sh").read_text()
# https://github.com/containerd/containerd/blob/v1.6.20/docs/cri/config.md
CONTAINERD = (MACHINES / "containerd.toml").read_text()


def missing() -> str | None:
    """Why there can be no real node on this machine; None where there can."""
    programs = [name for name in ("containerd", "ctr", "runc", "bash", "unshare") if not shutil.which(name)]
    files = [CACHE / "kubelet", PLUGINS / "bridge", PLUGINS / "host-local", BUSYBOX]
    absent = [*programs, *(str(path) for path in files if not path.exists())]
    if absent:
        return f"not installed: {', '.join(absent)} (`make kubernetes` installs them)"
    if not any(hierarchies()):
        return "this machine has no cgroup v1, and kubelet 1.20 needs one without systemd"
    return None


def hierarchies() -> Iterator[tuple[str, Path]]:
    """(option of mount, folder) of each cgroup v1 hierarchy."""
    for line in Path("/proc/self/cgroup").read_text("utf-8").splitlines():
        names = line.split(":")[1]
        folder = Path("/sys/fs/cgroup") / names.removeprefix("name=")
        if names and folder.is_dir():
            yield (f"none,{names}" if names.startswith("name=") else names), folder


class RealNode:
    """Started by the constructor, ended with the cluster. From then on the namespaces' `kubectl` is the real one."""

    def __init__(self, cluster: Cluster) -> None:
        reason = missing()
        assert reason is None, reason
        self.cluster = cluster
        self.address = f"10.77.{cluster.slot}.2"
        self.folder = cluster.base / "node"
        self._groups = [folder / cluster.base.name for _, folder in hierarchies()]
        self._replace_shim()
        self._write_files()
        self._make_groups()
        self._start()

    def _replace_shim(self) -> None:
        shim = self.cluster.base / "bin" / "kubectl"
        shim.unlink()
        shim.symlink_to(CACHE / "kubectl")

    def _write_files(self) -> None:
        for name in ("lib", "log", "cni", "kernel"):
            (self.folder / name).mkdir(parents=True)
        for name, value in KERNEL.items():
            (self.folder / "kernel" / Path(name).name).write_text(value, "utf-8")
        (self.folder / "resolv.conf").touch()
        (self.folder / "cni" / "bridge.conflist").write_text(json.dumps(self._network()), "utf-8")
        (self.folder / "kubelet.json").write_text(json.dumps(self._settings()), "utf-8")
        settings = CONTAINERD.format(folder=self.folder, image=IMAGE, plugins=PLUGINS)
        (self.folder / "containerd.toml").write_text(settings, "utf-8")
        mounts = [f"mkdir {at}\nmount -t cgroup -o {option} cgroup {at}" for option, at in hierarchies()]
        script = NODE.format(
            folder=self.folder,
            kernel=" ".join(KERNEL),
            mounts="\n".join(mounts),
            kubelet=CACHE / "kubelet",
            kubeconfig=self.cluster.kubeconfig(ADMIN, "default"),
            name=NAME,
            address=self.address,
        )
        (self.folder / "node.sh").write_text(script, "utf-8")
        write_image(self.folder / "image.tar")

    def _network(self) -> dict[str, Any]:
        """Pods hang on the cluster's bridge; this machine is their gateway. https://www.cni.dev/plugins/current/"""
        network = f"10.77.{self.cluster.slot}"
        pool = {"subnet": f"{network}.0/24", "rangeStart": f"{network}.20", "gateway": f"{network}.1"}
        addresses = {"type": "host-local", "ranges": [[pool]], "routes": [{"dst": "0.0.0.0/0"}]}
        bridge = {"type": "bridge", "bridge": f"pk{self.cluster.slot}", "ipam": addresses}
        return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}

    def _settings(self) -> dict[str, Any]:
        """https://github.com/kubernetes/kubernetes/blob/v1.20.2/staging/src/k8s.io/kubelet/config/v1beta1/types.go"""
        return {
            "kind": "KubeletConfiguration",
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "address": self.address,
            "port": KUBELET_PORT,
            "healthzPort": 0,
            "tlsCertFile": str(self.cluster.plane.certificate),
            "tlsPrivateKeyFile": str(self.cluster.plane.key),
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "clusterDNS": [self.cluster.kubelet.name_server],
            "clusterDomain": "cluster.local",
            "resolvConf": str(self.folder / "resolv.conf"),
            "cgroupDriver": "cgroupfs",
            "enforceNodeAllocatable": [],
            "makeIPTablesUtilChains": False,
            "oomScoreAdj": 0,
            "failSwapOn": False,
            "featureGates": {"SizeMemoryBackedVolumes": True},  # as all kubelets do from 1.22 on
            "nodeStatusUpdateFrequency": "2s",
            "nodeLeaseDurationSeconds": 4,
            "evictionHard": {"nodefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            "volumePluginDir": str(self.folder / "plugins"),
        }

    def _make_groups(self) -> None:
        for group in self._groups:
            note(self.cluster.base, f"cgroup {group}")
            group.mkdir()
            for name in ("cpuset.cpus", "cpuset.mems"):  # empty in a new group, which then takes no process
                if (group / name).exists():
                    (group / name).write_text((group.parent / name).read_text())

    def _start(self) -> None:
        bridge = f"pk{self.cluster.slot}"
        subprocess.run(["ip", "addr", "add", f"{self.address}/32", "dev", bridge], check=True)
        script = JOIN.format(groups=" ".join(map(str, self._groups)), folder=self.folder)
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        with (self.cluster.base / "log" / "node.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", script], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={"PATH": path, "HOME": str(self.folder)}, start_new_session=True, cwd="/",
            )  # fmt: skip
        note_pid(self.cluster.base, self._process.pid)
        until(self._is_ready, "the node is ready")
        # The first process of the namespaces: when it is gone, so is everything there.
        pid = self._process.pid
        note_pid(self.cluster.base, int(Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8").split()[0]))

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, f"the node does not start: {self.tail()}"
        try:
            return self.cluster.node(NAME).is_ready
        except ApiError:
            return False

    def tail(self) -> str:
        """The end of the log of kubelet and containerd."""
        return (self.cluster.base / "log" / "node.log").read_text("utf-8", "replace")[-6000:]

    def control_group(self, pod: Pod, container: str) -> Path:
        """The memory control group of a container that runs; its cgroup.procs has pids as this machine numbers them."""
        rows = pod.status["containerStatuses"]
        [identity] = [row["containerID"].rpartition("/")[2] for row in rows if row["name"] == container]
        memory = next(group for group in self._groups if group.parent.name == "memory")
        [folder] = memory.rglob(identity)
        return folder
