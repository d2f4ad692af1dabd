"""For every test: a penstock home of its own. For the session: what was skipped is said aloud, or fails.

With PENSTOCK_REQUIRE_ALL=1 a skipped test is a failed one: that is what continuous integration runs.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import TypeVar

import pytest

# Marker -> the package without which its tests cannot run.
NEEDS = {"llamacpp": "xllamacpp", "vllm": "vllm"}

ReportT = TypeVar("ReportT", pytest.TestReport, pytest.CollectReport)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """PENSTOCK_HOME: an empty folder (not made yet), so that no test touches ~/.penstock."""
    path = tmp_path / "home"
    monkeypatch.setenv("PENSTOCK_HOME", str(path))
    # The sources are what is tested; test_native compiles them and tests the result.
    monkeypatch.setenv("PENSTOCK_NATIVE", "0")
    return path


def pytest_configure() -> None:
    """A shell starts background jobs with SIGINT ignored, children inherit that, and no test could press Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, package in NEEDS.items():
        if item.get_closest_marker(marker) and importlib.util.find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed")


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
    terminalreporter.write_line("PENSTOCK_REQUIRE_ALL=1 makes these failures; `make test` installs what they need.")
