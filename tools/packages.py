"""What tests need beyond .venv: `python3 tools/packages.py hosts postgres native observe browser kubernetes vessl`.
Reports what it cannot install.

Never starts what it installs: a package's service would belong to the machine, and the tests start their own daemons.
Standard library only. It always exits 0: without the packages only the tests that need them are skipped.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import kubernetes_build
import vessl_sdk

# Group -> {program: the package that brings it}.
GROUPS = {
    "hosts": {
        "ip": "iproute2",
        "ssh": "openssh-client",
        "sshd": "openssh-server",
        "slurmctld": "slurmctld",
        "slurmd": "slurmd",
        "sbatch": "slurm-client",
        "munged": "munge",
    },
    "postgres": {"pg_ctl": "postgresql"},
    "native": {"cc": "gcc"},
    "observe": {"promtool": "prometheus"},
    "browser": {"chromium": "chromium"},
    "kubernetes": {
        "etcd": "etcd-server",
        "openssl": "openssl",
        "ip": "iproute2",
        "containerd": "containerd",
        "busybox": "busybox-static",
    },
    "vessl": {},  # from a package index
}
# Packages that come without a program.
EXTRA = {
    "slurmctld": ["slurm-wlm-basic-plugins"],
    "cc": ["libc6-dev", "python3-dev"],
    "containerd": ["runc", "containernetworking-plugins"],
    "chromium": ["fonts-dejavu-core"],
}
POSTGRES = Path("/usr/lib/postgresql")  # Debian keeps the programs of each version in VERSION/bin, outside PATH
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TRIES = 3
# https://people.debian.org/~hmh/invokerc.d-policyrc.d-specification.txt: 101 is "forbidden".
POLICY = Path("/usr/sbin/policy-rc.d")
NO_SERVICES = "#!/bin/sh\nexit 101\n"


def main(groups: list[str]) -> int:
    if not groups or not GROUPS.keys() >= set(groups):
        raise SystemExit(f"usage: packages.py {'|'.join(GROUPS)} ...")
    path = ":".join([PATH, *map(str, POSTGRES.glob("*/bin"))])
    carriers = {program: package for group in groups for program, package in GROUPS[group].items()}
    absent = [program for program in carriers if not shutil.which(program, path=path)]
    if absent:
        _bring(carriers, absent)
    if "kubernetes" in groups and not kubernetes_build.is_complete():
        _build_kubernetes()
    if "vessl" in groups and not vessl_sdk.is_complete():
        _bring_vessl()
    return 0


def _bring(carriers: dict[str, str], absent: list[str]) -> None:
    names = [name for program in absent for name in [carriers[program], *EXTRA.get(program, [])]]
    began = time.monotonic()
    problem = _install(names)
    if problem is None:
        print(f"installed {' '.join(names)} in {time.monotonic() - began:.0f} s", flush=True)
    else:
        print(f"tests that need {', '.join(absent)} are skipped: {problem}", file=sys.stderr, flush=True)


def _build_kubernetes() -> None:
    began = time.monotonic()
    problem = kubernetes_build.bring(_install)
    if problem is None:
        print(f"built Kubernetes in {time.monotonic() - began:.0f} s", flush=True)
    else:
        print(f"tests that need Kubernetes are skipped: {problem}", file=sys.stderr, flush=True)


def _bring_vessl() -> None:
    began = time.monotonic()
    problem = vessl_sdk.bring()
    if problem is None:
        print(f"installed VESSL's SDK in {time.monotonic() - began:.0f} s", flush=True)
    else:
        print(f"tests that need VESSL's SDK are skipped: {problem}", file=sys.stderr, flush=True)


def _install(names: list[str]) -> str | None:
    """None, or the reason why it failed."""
    if not shutil.which("apt-get"):
        return "no apt-get here; install the equivalents of " + " ".join(names)
    root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if root and (not shutil.which("sudo") or subprocess.run([*root, "true"], capture_output=True).returncode):
        return "neither root nor sudo without a password; apt-get install " + " ".join(names)
    apt = [*root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120"]
    error = ""
    with _services_forbidden(root):
        for attempt in range(TRIES):
            time.sleep(5 * attempt)
            for words in (["update"], ["install", "-y", "--no-install-recommends", *names]):
                done = subprocess.run([*apt, *words], capture_output=True, text=True)
                error = done.stderr.strip()
            if done.returncode == 0:
                return None
    return f"apt-get: {error}"


@contextlib.contextmanager
def _services_forbidden(root: list[str]) -> Iterator[None]:
    if POLICY.exists():  # the machine has its own policy
        yield
        return
    subprocess.run([*root, "tee", str(POLICY)], input=NO_SERVICES, text=True, stdout=subprocess.DEVNULL, check=True)
    try:
        subprocess.run([*root, "chmod", "755", str(POLICY)], check=True)
        yield
    finally:
        subprocess.run([*root, "rm", "-f", str(POLICY)], check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
