"""Every test gets an empty penstock home; each rig runs in one worker process; skipped tests are listed, or fail.

With PENSTOCK_REQUIRE_ALL=1 a skipped test is a failed one: that is what continuous integration runs.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import hypothesis
import pytest
import quick_tier

if TYPE_CHECKING:
    from launching import Place

# How fast examples are on a busy machine says nothing of what they test. Each run has other examples.
hypothesis.settings.register_profile(
    "unhurried",
    max_examples=int(os.environ.get("PENSTOCK_EXAMPLES", "25")),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("unhurried")

# Marker -> the package without which its tests cannot run.
NEEDS = {"llamacpp": "xllamacpp", "vllm": "vllm"}
# Rig -> the worker process that runs its tests: a run has one sshd on each host of one set, one Slurm, one Ray and one
# Kubernetes.
RIGS = {
    "slurm_on": "slurm",
    "ray_on_two_hosts": "ray",
    "kubernetes_cluster": "kubernetes",
    "pod_hosts": "cloudera",
    "two_hosts": "hosts",
}
# Modules with the fixtures of rigs.
FIXTURES = ("hosts_fixtures", "kubernetes_fixtures", "cloudera_rig")
MODULE_MARKS = re.compile(r"^pytestmark = (.*)$", re.MULTILINE)
LONGEST_FIRST = ("vllm", "slurm", "hosts", "kubernetes", "ray", "llamacpp", "postgres")

ReportT = TypeVar("ReportT", pytest.TestReport, pytest.CollectReport)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """PENSTOCK_HOME: an empty folder (not made yet), so that no test touches ~/.penstock, nor a cluster or an account
    of ours."""
    path = tmp_path / "home"
    monkeypatch.setenv("PENSTOCK_HOME", str(path))
    monkeypatch.setenv("KUBECONFIG", os.devnull)
    monkeypatch.setenv("VESSL_CONFIG_PATH", os.devnull)
    monkeypatch.delenv("VESSL_ACCESS_TOKEN", raising=False)
    # The sources are what is tested; test_native compiles them and tests the result.
    monkeypatch.setenv("PENSTOCK_NATIVE", "0")
    return path


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs an `async def` test on a virtual loop, or on the real one of its `loop_factory`."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    import gateway_rig
    import virtual_loop

    given: dict[str, Any] = pyfuncitem.funcargs
    arguments = {name: given[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    if "loop_factory" in given:
        gateway_rig.run(given["loop_factory"], pyfuncitem.obj(**arguments))
    else:
        virtual_loop.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_factory(request: pytest.FixtureRequest) -> object:
    """Each real event loop that the gateway runs on."""
    return importlib.import_module(request.param).new_event_loop


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A home to start deployments in with the fake engine; nothing may be left of them."""
    from launching import a_place

    with a_place(tmp_path) as found:
        yield found


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(certificate, key) of the name localhost, as PEM files."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
        + ["-keyout", str(key), "-out", str(cert), "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True,
        capture_output=True,
    )
    return cert, key


def pytest_configure(config: pytest.Config) -> None:
    """A shell starts background jobs with SIGINT ignored, children inherit that, and no test could press Ctrl-C."""
    quick_tier.WATCH.install()
    for name in FIXTURES:
        config.pluginmanager.import_plugin(name)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_without(config: pytest.Config, marker: str) -> bool:
    """Return whether `-m "not (A or B)"` leaves out every test with that marker.

    Any other expression may choose such a test for another of its markers.
    """
    chosen = re.fullmatch(r"not \((\w+(?: or \w+)*)\)", str(config.option.markexpr))
    return chosen is not None and marker in chosen[1].split(" or ")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file whose `pytestmark` leaves out all its tests is not even imported."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    marks = MODULE_MARKS.search(collection_path.read_text("utf-8"))
    names = re.findall(r"pytest\.mark\.(\w+)", marks[1]) if marks else []
    return True if any(is_without(config, name) for name in names) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collection makes half a million objects that stay: a collector of garbage need not visit them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For `--dist loadgroup`: one group a rig, the longest first, and each test without a rig by itself."""
    groups = {item: worker_group(item) for item in items}
    # For `--dist worksteal`: the head of a worker's tests is never stolen, and to parse all files twice is dear.
    items.sort(key=lambda item: item.path.name != "test_tidy.py")
    items.sort(key=lambda item: LONGEST_FIRST.index(group) if (group := groups[item]) in LONGEST_FIRST else 9)
    for item, group in groups.items():
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))
            _write_group(item, group)


def _write_group(item: pytest.Item, group: str) -> None:
    """xdist 3.8 groups tests by "@GROUP" at the end of their ids, and writes it where pytest 9.2 does not read it any
    more: each worker process then had a Slurm and a Ray of its own."""
    identity = getattr(item, "_id", None)
    if identity is not None and item.config.getoption("loadgroup", False):
        item._id = type(identity).parse(f"{item.nodeid}@{group}")


def worker_group(item: pytest.Item) -> str | None:
    rigs = [RIGS[name] for name in getattr(item, "fixturenames", ()) if name in RIGS]
    if rigs or item.get_closest_marker("hosts"):
        return rigs[0] if rigs else "hosts"
    # A module's tests on one engine follow each other, so that it is started once.
    return next((name for name in ("vllm", "llamacpp", "postgres") if item.get_closest_marker(name)), None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, package in NEEDS.items():
        if item.get_closest_marker(marker) and importlib.util.find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    with quick_tier.watched(quick_tier.allowed(item)):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _judge((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _judge((yield))


def _judge(report: ReportT) -> ReportT:
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("PENSTOCK_REQUIRE_ALL") == "1":
        report.outcome = "failed"
        report.longrepr = f"skipped, and PENSTOCK_REQUIRE_ALL=1 allows no skip: {_reason(report)}"
    return report


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if not skipped:
        return
    terminalreporter.section(f"NOT TESTED: {len(skipped)} skipped", sep="!", red=True, bold=True)
    for report in skipped:
        terminalreporter.write_line(f"{report.nodeid}: {_reason(report)}")
    terminalreporter.write_line(
        "PENSTOCK_REQUIRE_ALL=1 makes these failures; `make installed kubernetes` installs what they need."
    )
