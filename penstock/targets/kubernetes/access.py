"""The `kubectl` program of this machine: contexts, a proxy to the API, port-forward, exec.

kubectl brings every login to a cluster (exec plugins, certificates, SSO), so penstock has none of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from penstock import paths
from penstock.errors import PenstockError, UserError
from penstock.processes import Backoff

_ANSWER_S, _START_S, _END_S = 20.0, 20.0, 2.0
_POLL_S = 0.02
_SHOWN_BYTES, _SHOWN_LINES = 4096, 8
# kubectl logs with https://pkg.go.dev/k8s.io/klog: "E1122 18:23:26.388079   16777 proxy_server.go:147] words".
_KLOG = re.compile(r"[EFIW]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ \S+:\d+\] ")
_ANSWERED = "Error while proxying request: "
# kubectl leads a process group with a watcher, which reads the pipe that only we hold: however we end, it removes the
# folder $0 and ends the group, plugins of kubectl too. The group's id cannot become another's while the watcher is in
# it. PR_SET_PDEATHSIG would end kubectl with the thread that started it, and macOS has none.
_GUARDED = (
    'exec 3<&0 </dev/null; (read -r _ <&3; [ -z "$0" ] || rm -rf -- "$0"; kill -TERM 0) >/dev/null 2>&1 & '
    'exec "$@" 3<&-'
)


class Context(NamedTuple):
    """A context of the kubeconfig."""

    name: str
    namespace: str


def kubectl() -> str:
    """The program's path.  Raises UserError when it is not installed."""
    path = shutil.which("kubectl")
    if path is None:
        hint = "Install kubectl: https://kubernetes.io/docs/tasks/tools/"
        raise UserError("cannot reach a Kubernetes cluster: kubectl is not installed here", hint=hint)
    return path


def is_configured() -> bool:
    """Whether a cluster can be asked: kubectl is installed, and a kubeconfig names one."""
    files = os.environ.get("KUBECONFIG", "").split(os.pathsep) if os.environ.get("KUBECONFIG") else ["~/.kube/config"]
    return shutil.which("kubectl") is not None and any(Path(file).expanduser().is_file() for file in files if file)


def context_of(name: str | None) -> Context:
    """The context of that name, or the current one.  Raises UserError that names those that exist."""
    config = _configuration(kubectl(), os.environ.get("KUBECONFIG"))
    contexts = {row["name"]: row.get("context") or {} for row in config.get("contexts") or []}
    chosen = str(name or config.get("current-context") or "")
    if chosen in contexts:
        return Context(chosen, contexts[chosen].get("namespace") or "default")
    detail = f"contexts: {', '.join(sorted(contexts)) or 'none'}"
    if not chosen:
        hint = "Set kubernetes.context, or choose one: kubectl config use-context NAME."
        raise UserError("the kubeconfig has no current context", detail=detail, hint=hint)
    hint = "`kubectl config get-contexts` lists them; KUBECONFIG names the file."
    raise UserError(f'the kubeconfig has no context "{chosen}"', detail=detail, hint=hint)


@functools.cache  # a failure is not kept
def _configuration(program: str, kubeconfig: str | None) -> dict[str, Any]:  # noqa: ARG001 - the answer depends on it
    argv, null = [program, "config", "view", "-o", "json"], subprocess.DEVNULL
    try:
        done = subprocess.run(argv, env=_environment(), capture_output=True, stdin=null, timeout=_ANSWER_S, check=False)
    except subprocess.TimeoutExpired as exc:
        raise PenstockError(f"`kubectl config view` did not answer within {_ANSWER_S:.0f} s") from exc
    if done.returncode:
        hint = "KUBECONFIG names the file; ~/.kube/config when it is not set."
        detail = _shown(done.stderr.decode("utf-8", "replace"))
        raise UserError("kubectl cannot read its configuration", detail=detail, hint=hint)
    config: dict[str, Any] = json.loads(done.stdout)
    return config


def _environment() -> dict[str, str]:
    """Ours without our marks, by which the processes of a run are found."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}


def _shown(stderr: str) -> str | None:
    """The last lines, each once, without klog's front and what the proxy answered too."""
    lines = [_KLOG.sub("", line).rstrip() for line in stderr.splitlines()]
    kept = list(dict.fromkeys(line for line in lines if line and not line.startswith(_ANSWERED)))[-_SHOWN_LINES:]
    return "\n".join(line[:300] for line in kept) or None


class _Child:
    """kubectl, which ends when this process ends, also when that is killed."""

    def __init__(self, words: Sequence[str], folder: Path | None = None) -> None:
        """`folder` is removed at the end."""
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe that nobody reads would block it
        self._child = subprocess.Popen(
            ["/bin/sh", "-c", _GUARDED, str(folder or ""), kubectl(), *words],
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )

    def is_alive(self) -> bool:
        return self._child.poll() is None

    def lines(self) -> Iterator[bytes]:
        """What it prints, until it ends."""
        assert self._child.stdout is not None
        return iter(self._child.stdout)

    def complaint(self) -> str | None:
        """The last lines of its error output."""
        # Not seek and read: kubectl writes at the offset that it shares with us.
        n_bytes = os.fstat(self._errors.fileno()).st_size
        tail = os.pread(self._errors.fileno(), _SHOWN_BYTES, max(0, n_bytes - _SHOWN_BYTES))
        return _shown(tail.decode("utf-8", "replace"))

    def stop(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()  # the watcher ends the group
        try:
            self._child.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()

    def close(self) -> None:
        assert self._child.stdout is not None
        self._child.stdout.close()
        self._errors.close()


# ---- the proxy -------------------------------------------------------------------------------------------------------


class ProxyError(PenstockError):
    """kubectl did not start as a proxy; the detail has its words."""


class UnixConnection(http.client.HTTPConnection):
    """HTTP over the socket at `path`. The host is "localhost": kubectl's proxy refuses others."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Proxy:
    """`kubectl proxy` on a socket that only this user can reach, started when first needed and again when it has ended.

    Threads may share it. https://kubernetes.io/docs/reference/kubectl/generated/kubectl_proxy/
    """

    def __init__(self, context: str) -> None:
        self.where = f'context "{context}"'
        self._context = context
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._socket = Path()

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """A connection to it, not yet open.  Raises ProxyError when kubectl does not start."""
        with self._lock:
            if self._child is None or not self._child.is_alive():
                self._end()
                self._start()
            return UnixConnection(self._socket, timeout_s)

    def headers(self) -> dict[str, str]:
        return {}  # kubectl adds the credentials

    def complaint(self) -> str | None:
        """What kubectl and its plugins printed last."""
        with self._lock:
            return self._child.complaint() if self._child is not None else None

    def end(self) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.stop()
            self._child.close()
            self._child = None

    def _start(self) -> None:
        folder = paths.socket_folder()
        self._socket = folder / "api"
        self._child = _Child(["--context", self._context, "proxy", f"--unix-socket={self._socket}"], folder)
        deadline = time.monotonic() + _START_S
        while self._child.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(self._socket))
                return
            time.sleep(_POLL_S)
        what = f"did not start within {_START_S:.0f} s" if self._child.is_alive() else "ended at once"
        complaint = self._child.complaint()
        self._end()
        raise ProxyError(f"kubectl proxy for {self.where} {what}", detail=complaint, is_retryable=True)


def proxy_of(context: str) -> Proxy:
    """The proxy of a context, one in a process."""
    return _proxy(context, os.environ.get("KUBECONFIG"))


@functools.cache
def _proxy(context: str, kubeconfig: str | None) -> Proxy:  # noqa: ARG001 - the context is of that file
    proxy = Proxy(context)
    atexit.register(proxy.end)
    return proxy


# ---- port-forward and exec -------------------------------------------------------------------------------------------

_GIVES_UP_S = 60.0
_POD_WAIT_S = 15
_IS_OPEN = b"Forwarding from"


class Forward:
    """An open port on this machine: `url` leads to the service.

    kubectl keeps to one pod, notices its end at the next connection, and is started again then.
    """

    def __init__(self, words: Sequence[str], url: str) -> None:
        self.url = url
        self._words = words
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._is_open = threading.Event()
        self._last_words: str | None = None
        self._child = _Child(words)
        self._thread = threading.Thread(target=self._keep_open, name="port-forward", daemon=True)
        self._thread.start()

    def last_words(self) -> str | None:
        """What kubectl printed before it was given up; None while the port is open or opens again."""
        return self._last_words

    def wait_open(self) -> None:
        """Raises PenstockError when kubectl cannot open it."""
        deadline = time.monotonic() + _START_S
        while not self._is_open.wait(_POLL_S):
            if self._last_words is not None or time.monotonic() > deadline:
                words = self._last_words or self._child.complaint()
                raise PenstockError(f"could not open a tunnel to {self._words[-2]}", detail=words, is_retryable=True)

    def end(self) -> None:
        with self._lock:
            self._is_over.set()
            self._child.stop()
        self._thread.join()
        self._child.close()

    def _keep_open(self) -> None:
        try:
            self._last_words = self._run()
        except (OSError, PenstockError) as exc:
            self._last_words = str(exc)

    def _run(self) -> str | None:
        """Why it was given up; None when it was ended."""
        backoff = Backoff(0.2, 5.0, 30.0)
        failing_since: float | None = None
        while True:
            for line in self._child.lines():
                if line.startswith(_IS_OPEN):
                    self._is_open.set()
                    failing_since = None
            now = time.monotonic()
            failing_since = failing_since or now
            # Before it was open once, waiting helps nobody.
            if not self._is_open.is_set() or now - failing_since > _GIVES_UP_S:
                return self._child.complaint() or "kubectl ended without a word"
            if self._is_over.wait(backoff.next(now)):
                return None
            with self._lock:
                if self._is_over.is_set():
                    return None
                self._child.stop()
                self._child.close()
                self._child = _Child(self._words)


@contextlib.contextmanager
def port_forward(context: str | None, namespace: str, service: str, port: int, local_port: int) -> Iterator[Forward]:
    """A port of 127.0.0.1 that leads to a port of a service, for as long as the block lasts.

    Raises PenstockError with kubectl's words when it does not open.
    """
    words = ["port-forward", "--address=127.0.0.1", f"--pod-running-timeout={_POD_WAIT_S}s"]
    words += [f"service/{service}", f"{local_port}:{port}"]
    forward = Forward([*_place(context, namespace), *words], f"http://127.0.0.1:{local_port}")
    try:
        forward.wait_open()
        yield forward
    finally:
        forward.end()


def exec_argv(
    context: str | None, namespace: str, workload: str, container: str, words: Sequence[str], is_terminal: bool = False
) -> list[str]:
    """The command that runs these words in a pod of a workload ("deployment/NAME"), with our input and output.

    Its exit code is theirs; 1 also when kubectl could not run them.
    """
    options = ["-it" if is_terminal else "-i", workload, "-c", container]
    return [kubectl(), *_place(context, namespace), "exec", *options, "--", *words]


def _place(context: str | None, namespace: str) -> list[str]:
    return [*(["--context", context] if context else []), "--namespace", namespace]
