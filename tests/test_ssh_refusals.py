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
from penstock.targets.ssh import target

pytestmark = pytest.mark.hosts


@pytest.fixture
def place(tmp_path: Path, hosts: Hosts) -> Iterator[Place]:
    with a_place(tmp_path) as ours:
        yield ours


def check_refused(place: Place, hosts: Hosts, *words: str, ssh: dict[str, Any] | None = None, **fields: Any) -> None:
    """`up` refuses the file with these words, and changes nothing."""
    done = call("up", write(place, hosts, ssh=ssh, **fields))
    assert done.code == 2, done
    assert [word for word in words if word not in done.err] == [], done.err
    assert run_folder.every() == []
    assert left_on(hosts) == []


def with_config(place: Place, hosts: Hosts, old: str, new: str) -> dict[str, Any]:
    """The hosts' ssh configuration with a change, as fields of the block."""
    path, text = place.folder / "ssh_config", hosts.ssh_config.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")
    return {"config": str(path)}


@pytest.mark.nightly
def test_hosts_keys_and_pythons_that_cannot_be_used(place: Place, hosts: Hosts) -> None:
    keys, other, known = hosts.base / "keys", place.folder / "other-key", place.folder / "known_hosts"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    refused = "node1 cannot be reached over ssh: it refuses our key"
    check_refused(place, hosts, refused, "ssh-add", ssh=with_config(place, hosts, str(keys / "user"), str(other)))
    first, second = ((keys / f"{name}.pub").read_text("utf-8").strip() for name in hosts.names)
    known.write_text((keys / "known_hosts").read_text("utf-8").replace(first, second), "utf-8")
    block = with_config(place, hosts, str(keys / "known_hosts"), str(known))
    check_refused(place, hosts, "its host key is not the one that is known", "ssh-keygen -R node1", ssh=block)

    unknown = "ssh.hosts[1]: node77.invalid cannot be reached over ssh: there is no such host"
    check_refused(place, hosts, unknown, "~/.ssh/config", ssh={"hosts": ["node1", "node77.invalid"]})
    check_refused(place, hosts, "nothing listens for ssh there", ssh={"hosts": ["ssh://node1:2222"]})
    absent = 'there is no Python on node1: "/opt/none/bin/python3" does not start'
    check_refused(place, hosts, absent, "ssh.python", ssh={"python": "/opt/none/bin/python3"})
    old = hosts.shared / "python3.6"
    old.write_text('#!/bin/sh\ncat >/dev/null\nprintf \'{"too_old": "3.6.8"}\'\n')
    old.chmod(0o755)
    check_refused(place, hosts, f'the Python of node2 is too old: "{old}" is 3.6.8', ssh={"python": str(old)})
    model = place.folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    check_refused(place, hosts, f'model: {model} is not on "node1"', 'is not on "node2"', model=str(model))


@pytest.mark.nightly
def test_a_folder_that_is_full_or_cannot_be_written(
    place: Place, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts[1].run(["sh", "-c", "mkdir /run/small && mount -t tmpfs -o size=4m tmpfs /run/small"])
    free = "ssh.folder: node2 has 4.0 MiB free in /run/small/penstock (free 128 MiB for penstock and its logs"
    check_refused(place, hosts, free, ssh={"folder": "/run/small/penstock"})
    monkeypatch.setattr(target, "_MIN_FREE_BYTES", 0)  # filled by another process in between
    done = call("up", write(place, hosts, ssh={"folder": "/run/small/penstock"}))
    assert done.code == 1, done
    assert "could not bring penstock to node2: its disk is full" in done.err and "ssh.folder" in done.err
    assert run_folder.every() == []
    assert hosts[1].run(["sh", "-c", "ls -A /run/small/penstock/versions"]).stdout == ""
    done = call("up", write(place, hosts, ssh={"folder": "/proc/penstock"}))
    assert done.code == 1, done
    assert "/proc/penstock" in done.err and "Traceback" not in done.err
