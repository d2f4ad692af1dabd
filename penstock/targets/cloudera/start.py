"""The script of all pods of a deployment. The workbench runs it inside a Python kernel: standard library only, no
`__file__`, and an event loop already runs, so all it does is to start a process and to wait for it."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

FACTS: dict[str, Any] = {}

UNIT = os.environ["PENSTOCK_UNIT"]  # "gateway", "ui", "weights", "r0-n1"
RUN, CODE, VENV = Path(FACTS["run"]), Path(FACTS["code"]), Path(FACTS["venv"])
LOOK_S, INSTALL_S, SILENT_S = 1.0, 3600.0, 120.0
JOB_LIMIT = "JOB_MAXIMUM_MINUTES"
LIMITS = (JOB_LIMIT, "SESSION_MAXIMUM_MINUTES", "IDLE_MAXIMUM_MINUTES")  # the last two are of sessions


def say(words: str) -> None:
    """To the console of the workbench, and to the log that penstock reads."""
    print(f"penstock: {words}", flush=True)
    with (RUN / "logs" / f"{LOG}.log").open("a") as stream:
        stream.write(f"penstock: {words}\n")


def unpack() -> None:
    """penstock's code, once for all pods: whoever is first renames it into its place."""
    if not CODE.exists():
        new = CODE.with_name(f"{CODE.name}.{UNIT}.{os.getpid()}.new")
        with zipfile.ZipFile(f"{CODE}.zip") as whole:
            whole.extractall(new)
        try:
            new.rename(CODE)
        except OSError:
            subprocess.run(["rm", "-rf", str(new)], check=False)


def python() -> str:
    """The interpreter with the engine: the file's, or that of an environment which the application makes once."""
    if FACTS["python"]:
        return str(FACTS["python"])
    if sys.version_info < (3, 11):  # noqa: UP036 - a runtime may have any
        raise SystemExit(f"the runtime has Python {sys.version.split()[0]}, and penstock needs 3.11")
    ready, failed = VENV / "ready", VENV / "failed"
    if UNIT == "gateway" and not ready.exists():
        failed.unlink(missing_ok=True)
        install(ready, failed)
    deadline = time.monotonic() + INSTALL_S
    while not ready.exists():
        if failed.exists() or time.monotonic() > deadline:
            raise SystemExit(failed.read_text() if failed.exists() else "the Python environment was not made in time")
        time.sleep(LOOK_S)
    return str(VENV / "bin" / "python")


def install(ready: Path, failed: Path) -> None:
    """Make the environment, and answer the workbench's poller while pip works: it may take ten minutes."""
    say(f"installs {', '.join(FACTS['requirements'])}")
    VENV.mkdir(parents=True, exist_ok=True)
    port, pip = os.environ.get("CDSW_APP_PORT"), [str(VENV / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    words = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(waiting_page()), port or ""]
    poller = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) if port else None
    try:
        for argv in ([sys.executable, "-m", "venv", "--copies", str(VENV)], [*pip, *FACTS["requirements"]]):
            done = subprocess.run(argv, env={**os.environ, **FACTS["pip"]}, capture_output=True, text=True, check=False)
            if done.returncode:
                lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
                failed.write_text(f"could not install the engine: {lines[-1]}")
                return
        ready.touch()
        say("installed")
    finally:
        if poller is not None:
            poller.terminate()
            poller.wait()


def waiting_page() -> Path:
    """A folder with the file "health"."""
    folder = VENV / "waiting"
    folder.mkdir(exist_ok=True)
    (folder / "health").write_text('{"status": "installs the engine"}')
    return folder


def argv_of(interpreter: str) -> list[str]:
    words = [interpreter, "-m"]
    if UNIT in ("gateway", "ui"):
        return [*words, "penstock.targets.cloudera.application", str(RUN), UNIT]
    if UNIT == "weights":
        return [*words, "penstock.targets.cloudera.weights", str(RUN)]
    replica, _, rank = UNIT[1:].partition("-n")
    launch = str(RUN / "artifact" / "launch.json")
    return [*words, "penstock.node", launch, "--replica", replica, "--rank", rank, "--kill-after", "3600"]


def the_launcher() -> Any:
    """Of workers. It marks those of an earlier start as gone before the controller looks."""
    module = runpy.run_path(str(CODE / "penstock" / "targets" / "cloudera" / "launcher.py"))
    return module["Launcher"](RUN, say)


def note(**facts: object) -> None:
    """What penstock cannot learn from the API: the pod's address, when its time is over, how it ended."""
    path = RUN / "pods" / f"{UNIT}.json"
    path.parent.mkdir(exist_ok=True)
    new = path.with_name(f".{UNIT}.{os.getpid()}")
    new.write_text(json.dumps(facts))
    new.rename(path)


def main() -> None:
    for folder in ("logs", "gateway", "secrets"):
        (RUN / folder).mkdir(exist_ok=True)
    for path in (RUN / "secrets").iterdir():
        path.chmod(0o600)  # a file that comes by the API can be read by others
    limits = {name: int(os.environ[name]) for name in LIMITS if os.environ.get(name, "").isdigit()}
    began = time.time()
    pod: dict[str, object] = {
        "address": os.environ.get("CDSW_IP_ADDRESS"),
        "engine": os.environ.get("CDSW_ENGINE_ID"),
        "began_at": began,
        "limits": limits,
    }
    # Applications have no limit, and workers live as long as the one that launched them.
    if UNIT not in ("gateway", "ui") and "PENSTOCK_WORKER" not in os.environ and JOB_LIMIT in limits:
        pod["ends_at"] = began + 60 * limits[JOB_LIMIT]
        pod["ends_by"] = f"{JOB_LIMIT}={limits[JOB_LIMIT]}"
    note(**pod)
    try:
        unpack()
        interpreter = python()
    except SystemExit as exc:
        say(str(exc))
        note(**pod, reason=str(exc))
        raise RuntimeError(str(exc)) from None
    env = {**os.environ, "PENSTOCK_HOME": FACTS["home"], "PYTHONPATH": str(CODE)}
    if UNIT in ("gateway", "ui") and (RUN / "ca.pem").exists():
        env["SSL_CERT_FILE"] = str(RUN / "ca.pem")  # they call the workbench, and download nothing
    launcher = the_launcher() if UNIT == "gateway" and FACTS["nodes"] == "workers" else None
    dashboard_port = os.environ.get(FACTS["dashboard_port"] or "")
    if UNIT.endswith("-n0") and dashboard_port:
        place = f"https://read-only-{os.environ.get('CDSW_ENGINE_ID')}.{os.environ.get('CDSW_DOMAIN')}"
        env |= {"PENSTOCK_RAY_DASHBOARD_PORT": dashboard_port, "PENSTOCK_RAY_DASHBOARD_URL": place}
    with (RUN / "logs" / f"{LOG}.log").open("ab") as log:
        child = subprocess.Popen(
            argv_of(interpreter), env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    is_asked = False
    while child.poll() is None:
        time.sleep(LOOK_S)
        if launcher is not None:
            launcher.step()
        if UNIT not in ("gateway", "ui") and not is_asked and (RUN / "gateway" / "drained").exists():
            is_asked = True
            child.terminate()
    note(**pod, code=child.returncode, ended_at=time.time())
    if child.returncode and not is_asked:
        raise RuntimeError(f"penstock ended with code {child.returncode}; its log: {RUN}/logs/{LOG}.log")


if UNIT in ("gateway", "ui", "weights"):
    LOG = "controller" if UNIT == "gateway" else UNIT
else:
    LOG = f"replica-{UNIT[1:]}".replace("-n0", "")
main()
