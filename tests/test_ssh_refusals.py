"""What target ssh refuses before anything starts: in words, with a hint, exit code 2, and nothing changed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import Hosts
from launching import Place, a_place, call
from ssh_rig import left_on, write

from penstock import run_folder

pytestmark = pytest.mark.hosts


@pytest.fixture
def place(tmp_path: Path, hosts: Hosts) -> Iterator[Place]:
    with a_place(tmp_path, deadline_s=60.0) as found:
        yield found


def refusal(place: Place, hosts: Hosts, ssh: dict[str, Any] | None = None, **fields: Any) -> str:
    """What `up` says of a file that it must refuse, having changed nothing."""
    done = call("up", write(place, hosts, ssh=ssh, **fields))
    assert done.code == 2, done
    assert run_folder.every() == []
    assert left_on(hosts) == []
    return done.err


def with_config(place: Place, hosts: Hosts, old: str, new: str) -> dict[str, Any]:
    """The hosts' ssh configuration with a change, as fields of the block."""
    path = place.folder / "ssh_config"
    text = hosts.ssh_config.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")
    return {"config": str(path)}


def test_a_name_that_nobody_knows(place: Place, hosts: Hosts) -> None:
    told = refusal(place, hosts, {"hosts": ["node1", "node77.invalid"]})
    assert "ssh.hosts[1]: node77.invalid cannot be reached over ssh: there is no such host" in told
    assert "~/.ssh/config" in told and "ssh.hosts[0]" not in told


def test_a_port_where_nothing_listens(place: Place, hosts: Hosts) -> None:
    told = refusal(place, hosts, {"hosts": ["ssh://node1:2222"]})
    assert "nothing listens for ssh there" in told


def test_a_host_that_is_off(place: Place, hosts: Hosts) -> None:
    hosts[1].kill()
    told = refusal(place, hosts)
    assert "ssh.hosts[1]: node2 cannot be reached over ssh" in told
    assert "Is the host on" in told


def test_a_key_that_is_refused(place: Place, hosts: Hosts) -> None:
    key = place.folder / "other-key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    told = refusal(place, hosts, with_config(place, hosts, str(hosts.base / "keys" / "user"), str(key)))
    assert "node1 cannot be reached over ssh: it refuses our key" in told
    assert "ssh-add" in told


def test_a_host_key_that_changed(place: Place, hosts: Hosts) -> None:
    known = place.folder / "known_hosts"
    first, second = (hosts.base / "keys" / f"{name}.pub" for name in hosts.names)
    lines = (hosts.base / "keys" / "known_hosts").read_text("utf-8")
    swapped = lines.replace(first.read_text("utf-8").strip(), second.read_text("utf-8").strip())
    known.write_text(swapped, "utf-8")
    told = refusal(place, hosts, with_config(place, hosts, str(hosts.base / "keys" / "known_hosts"), str(known)))
    assert "its host key is not the one that is known" in told and "ssh-keygen -R node1" in told


def test_a_host_without_that_python(place: Place, hosts: Hosts) -> None:
    told = refusal(place, hosts, {"python": "/opt/none/bin/python3"})
    assert 'there is no Python on node1: "/opt/none/bin/python3" does not start' in told
    assert "ssh.python" in told


def test_a_python_that_is_too_old(place: Place, hosts: Hosts) -> None:
    old = hosts.shared / "python3.6"
    old.write_text('#!/bin/sh\ncat >/dev/null\nprintf \'{"too_old": "3.6.8"}\'\n')
    old.chmod(0o755)
    told = refusal(place, hosts, {"python": str(old)})
    assert f'the Python of node2 is too old: "{old}" is 3.6.8' in told


def test_a_disk_that_is_full(place: Place, hosts: Hosts) -> None:
    hosts[1].run(["sh", "-c", "mkdir /run/small && mount -t tmpfs -o size=4m tmpfs /run/small"])
    done = call("up", write(place, hosts, ssh={"folder": "/run/small/penstock"}))
    assert done.code == 1, done
    assert "could not bring penstock to node2: its disk is full" in done.err and "ssh.folder" in done.err
    assert run_folder.every() == []
    assert "versions" not in hosts[1].run(["sh", "-c", "ls -A /run/small/penstock/versions"]).stdout


def test_a_folder_that_cannot_be_written(place: Place, hosts: Hosts) -> None:
    done = call("up", write(place, hosts, ssh={"folder": "/proc/penstock"}))
    assert done.code == 1, done
    assert "/proc/penstock" in done.err and "Traceback" not in done.err


def test_a_model_that_only_this_machine_has(place: Place, hosts: Hosts) -> None:
    folder = place.folder / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    told = refusal(place, hosts, model=str(folder))
    assert f'model: {folder} is not on "node1"' in told and 'is not on "node2"' in told


def test_all_that_is_wrong_with_the_file_at_once(place: Place, hosts: Hosts) -> None:
    told = refusal(
        place, hosts,
        {"hosts": ["-oProxyCommand=touch /tmp/owned", "node1", "node1"], "config": "here", "folder": "there"},
        hardware={"nodes": 4},
    )  # fmt: skip
    for part in (
        'ssh.hosts[0]: "-oProxyCommand=touch /tmp/owned" is no host',
        'ssh.hosts[2]: "node1" is there twice',
        "hardware.nodes: 4 nodes a replica, but ssh.hosts has 3",
        'ssh.config: "here" is not an absolute path',
        'ssh.folder: "there" is not an absolute path',
    ):
        assert part in told
    assert "ssh.hosts: no host" in refusal(place, hosts, {"hosts": []})
