"""`penstock dashboard`: what it opens and prints, on a run folder without a process."""

from __future__ import annotations

import html
import json
import stat
import webbrowser
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from nodes_rig import TOKEN, Rig, plan_for
from samples import deployment, end, run_folder
from test_cli import Shell

from penstock.node.group import rendezvous
from penstock.node.group.addresses import Formation, GroupNode
from penstock.run_folder import Run
from penstock.wire.announcement import engine_key, scrape_key

pytestmark = pytest.mark.loopback

URL = "http://127.0.0.1:8000/dashboard"
KEY = scrape_key(engine_key("secret-token"))


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    return Shell(capsys)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a browser was started with."""
    urls = list[str]()

    def start(url: str) -> bool:
        urls.append(url)
        return True

    monkeypatch.setattr(webbrowser, "open", start)
    return urls


@pytest.fixture
def keyed() -> Run:
    return run_folder(deployment(name="keyed", gateway={"auth": "keys"}))


def test_key_reaches_the_browser_in_a_private_file_not_on_a_command_line(
    shell: Shell, opened: list[str], keyed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISPLAY", ":0")
    code, out, err = shell("dashboard")
    file = keyed.path / "secrets" / "dashboard.html"
    assert opened == [file.as_uri()]
    assert f'content="0; url={html.escape(URL)}#key={KEY}"' in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert (code, out) == (0, "") and URL in err and KEY not in err


def test_without_a_display_the_link_is_printed_and_nothing_opened(
    shell: Shell, opened: list[str], keyed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.9 5000 10.0.0.7 22")
    _, out, err = shell("dashboard", "keyed")
    assert out == f"{URL}#key={KEY}\n"
    assert "changes nothing" in err and "ssh -N -L 8000:127.0.0.1:8000 " in err and err.endswith("@10.0.0.7\n")
    monkeypatch.setenv("DISPLAY", ":0")
    assert shell("dashboard", "--no-open")[1] == out
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    assert shell("dashboard")[1] == out
    assert opened == []


def test_as_json_and_without_keys_and_of_a_deployment_that_is_down_there_is_none(shell: Shell, keyed: Run) -> None:
    assert json.loads(shell("dashboard", "keyed", "--json")[1]) == {"url": URL, "key": KEY}
    run_folder(deployment(name="open"))
    assert json.loads(shell("dashboard", "open", "--json")[1]) == {"url": URL, "key": None}
    assert shell("dashboard", "open")[1] == f"{URL}\n"
    end(keyed)
    code, _, err = shell("dashboard", "keyed")
    assert code == 2 and 'cannot show deployment "keyed": it is down' in err


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path, plan_for("vllm", "ray", {"tensor": 2}))
    yield rig
    rig.close()


def test_the_token_of_rays_dashboard_is_printed_only_when_it_is_asked_for(
    shell: Shell, keyed: Run, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "GONE_AFTER_S", 600.0)
    assert "its replicas run without Ray" in shell("dashboard", "keyed", "--ray", "1")[2]
    (keyed.path / "plan.json").write_bytes(msgspec.json.encode(rig.plan))
    keyed.admin_token_file.write_text(TOKEN)
    keyed.gateway_config.write_bytes((rig.folder / "gateway.json").read_bytes())
    formation = Formation((GroupNode(0, "head", "127.0.0.1", "lo"),), 6001, 6000, "secret-of-ray")
    body = {"replica": "1", "rank": 0, "instance": "a", "epoch": "b", "content": {"phase": "gather"}}
    rig.admin.post_json("/admin/board", body)
    go = body | {"content": {"phase": "go", "formation": msgspec.to_builtins(formation)}}
    rig.admin.post_json("/admin/board", go | {"rank": 1})
    for replica in ("0", "1"):
        code, out, err = shell("dashboard", "keyed", "--ray", replica)
        assert (code, out) == (1, "") and f'its replica "{replica}" has no Ray now' in err
    rig.admin.post_json("/admin/board", go)
    for words in ([], ["--inside"]):
        code, out, err = shell("dashboard", "keyed", "--ray", "1", *words)
        assert (code, out) == (0, "secret-of-ray\n")
        assert "penstock logs keyed --replica 1" in err and "secret-of-ray" not in err
    assert json.loads(shell("dashboard", "keyed", "--ray", "1", "--json")[1]) == {"token": "secret-of-ray"}
    for verb in ("status", "dashboard"):
        assert "secret-of-ray" not in "".join(shell(verb, "keyed", "--json")[1:])
    for folder in (keyed.path, rig.folder):
        assert not any(b"secret-of-ray" in path.read_bytes() for path in folder.rglob("*") if path.is_file())
    rig.close()
    assert shell("dashboard", "keyed", "--ray", "1")[0] == 1, "the gateway is gone"
