"""`penstock requests`: the slowest, from a snapshot, and the newest, from the access log."""

# ruff: noqa: F811 - fixtures of test_cli
from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from samples import deployment, run_folder
from test_cli import Shell, shell  # noqa: F401 - a fixture

from penstock.deployment import live
from penstock.gateway.accounting.access_log import Line
from penstock.wire.live import Rates, SlowRequest, Snapshot

pytestmark = pytest.mark.loopback

SLOW = SlowRequest(
    at=1_790_000_000.0, request_id="r-1", key="alice", model="m", replica="0", outcome="complete", status=200,
    duration_s=75.2, hold_s=12.0, own_s=0.0004, first_byte_s=0.8, stream_s=62.4, prompt_tokens=900, output_tokens=700,
)  # fmt: skip
REFUSED = msgspec.structs.replace(SLOW, outcome="no_replica", status=503, replica="", first_byte_s=None, stream_s=None)
LINE = Line(
    "2026-09-21T14:13:30.000Z", "r-1", None, "a\x1b[2Jlice", "m", "0", "POST", "/v1/chat/completions", 200, "complete",
    10, 4, 6, 0.0, 81.5, 12.5, 1010.0, 0.2, "openai/1", "10.0.0.9",
)  # fmt: skip


def test_the_slowest_say_where_their_time_went(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder(deployment(name="d"))
    shown = Snapshot("d", 0.0, "1", Rates(0.0), slow=(SLOW, REFUSED))
    monkeypatch.setattr(live, "snapshot", lambda run: shown)
    head, first, second = shell("requests", "d", "--slow")[1].splitlines()
    assert head.split()[:6] == ["AT", "TOOK", "HOLD", "GATEWAY", "FIRST", "BYTE"]
    for cell in ("14:13:20Z", "1m15s", "12.0 s", "0 ms", "800 ms", "900 + 700", "complete 200", "alice", "r-1"):
        assert cell in first
    assert "no_replica 503" in second
    lines = shell("requests", "d", "--slow", "-n", "1", "--json")[1].splitlines()
    assert [json.loads(line)["stream_s"] for line in lines] == [62.4]


def test_the_newest_are_read_over_rotated_files(shell: Shell, tmp_path: Path) -> None:
    place = tmp_path / "access.log"
    run_folder(deployment(name="d", gateway={"access_log": str(place)}))
    code, _, error = shell("requests", "d")
    assert code == 2 and "is not on this machine" in error
    place.write_bytes(b"")
    assert shell("requests", "d")[1] == "no request yet\n"

    def lines(*ids: str) -> bytes:
        return b"".join(msgspec.json.encode(msgspec.structs.replace(LINE, request_id=each)) + b"\n" for each in ids)

    Path(f"{place}.1").write_bytes(lines("1", "2"))
    place.write_bytes(lines("3") + b'{"time": "torn\n' + lines("4"))
    shown = [json.loads(line)["request_id"] for line in shell("requests", "d", "--json")[1].splitlines()]
    assert shown == ["1", "2", "3", "4"]
    text = shell("requests", "d", "-n", "1")[1]
    assert "\x1b" not in text
    assert text.splitlines()[-1].split()[:3] == ["2026-09-21T14:13:30.000Z", "200", "complete"]
    assert shell("requests", "d", "-n", "0")[1] == "no request yet\n"
    for name, config in (("none", {}), ("e", {"access_log": "stderr"})):
        run_folder(deployment(name=name, gateway=config))
    code, _, error = shell("requests", "none")
    assert code == 2 and "gateway.access_log" in error and "--slow" in error
    assert "penstock logs e --part gateway" in shell("requests", "e")[2]
