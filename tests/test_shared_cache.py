"""What an engine compiled goes to a node of the same run that lacks it: whole and with the right hashes, or not."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nodes_rig import Rig
from samples import demo_plan
from test_staging import Gateway
from waiting import left_s, until

from penstock import paths, processes
from penstock.errors import PenstockError
from penstock.models.fetch_files import Layout
from penstock.models.sources import Listing, RemoteFile, Source
from penstock.node import file_server, peers, shared_cache
from penstock.node.file_server import FileServer
from penstock.node.shared_cache import Holder, SharedCache, key, list_folder
from penstock.planner import Plan
from penstock.run_folder import Launch
from penstock.text import MIB

pytestmark = pytest.mark.loopback

PLAN = demo_plan("fake", args={"compile-s": 1.0})
FILES = {
    "torch_compile_cache/0a1b/rank_0_0/backbone/graph.py": b"graph = 1\n" * 1000,
    "torch_compile_cache/0a1b/inductor_cache/x/kernel.so": os.urandom(3 * MIB),
    "triton/ABC/launcher.so": b"\x7fELF",
    "triton/ABC/empty": b"",
    "start-1/startup_plan/plan.json": b"{}",
}


class Node:
    """A node's cache, in a folder of its own."""

    def __init__(self, gateway: Any, home: Path, plan: Plan = PLAN, rank: int = 0, is_spread: bool = True) -> None:
        self.folder, self.is_stopped = home / "vllm-0.33.0" / "NVIDIA-H100-580", False
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        launch = Launch("x", plan, (), "", is_spread=is_spread)
        self.cache = SharedCache(launch, rank, gateway, lambda: self.is_stopped)

    def fill(self, files: dict[str, bytes]) -> None:
        for name, body in files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(body)

    def start(self) -> str:
        """As before an engine's first start; what is told of it."""
        self.cache.begin(str(self.folder))
        self.cache.wait()
        return self.cache.text

    @property
    def files(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in self.folder.rglob("*")
            if path.is_file() and not path.name.startswith(".")
        }


@pytest.fixture(autouse=True)
def _on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_cache, "MOST_S", 60.0)
    monkeypatch.setattr(shared_cache, "_LOOK_S", 30.0)
    monkeypatch.setattr(peers, "own_addresses", lambda _: ["127.0.0.1"])


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


@pytest.fixture
def first(gateway: Gateway, tmp_path: Path) -> Node:
    """A node that has compiled and gives."""
    node = Node(gateway, tmp_path / "first")
    assert node.start() == "", "nobody has it"
    node.fill(FILES)
    (node.folder / "start-1" / "torch_compile_cache").symlink_to("../torch_compile_cache")
    (node.folder / "secret").symlink_to("/etc/passwd")
    node.cache.give()
    until(lambda: holders(gateway), "it gives")
    return node


def holders(gateway: Gateway) -> list[Holder]:
    rows = [view.post for view in gateway.board.rows(0.0)]
    return [msgspec.convert(row.content["holder"], Holder) for row in rows if row.content.get("holder")]


def test_a_later_node_gets_all_files_for_its_user_alone_and_no_link(
    gateway: Gateway, first: Node, tmp_path: Path
) -> None:
    later = Node(gateway, tmp_path / "later")
    text = later.start()
    assert text.startswith("compiled code from ") and ": 5 files, 3.0 MiB in " in text
    assert later.files == FILES
    places = [path.lstat().st_mode for path in later.folder.rglob("*")]
    assert not [mode for mode in places if mode & 0o077], "no other user reads or writes it"
    assert not any(path.is_symlink() for path in later.folder.rglob("*"))


def test_what_is_there_stays_and_what_came_is_given_on(gateway: Gateway, first: Node, tmp_path: Path) -> None:
    later = Node(gateway, tmp_path / "later")
    later.fill({"triton/ABC/launcher.so": b"mine", "triton/DEF/other.so": b"other"})
    (later.folder / "start-1").mkdir()
    (later.folder / "start-1" / "startup_plan").symlink_to("/nowhere")  # is not followed
    assert later.start().startswith("compiled code from ")
    assert later.files == {name: body for name, body in FILES.items() if not name.startswith("start-1")} | {
        "triton/ABC/launcher.so": b"mine",
        "triton/DEF/other.so": b"other",
    }
    later.cache.give()
    until(lambda: len(holders(gateway)) == 2, "it gives too")
    assert Node(gateway, tmp_path / "later").start() == "", "it has started from this folder before"


@pytest.mark.parametrize("other", ["plan", "rank", "local"])
def test_another_start_gets_nothing(gateway: Gateway, first: Node, tmp_path: Path, other: str) -> None:
    plan = msgspec.structs.replace(PLAN, max_model_len=77) if other == "plan" else PLAN
    node = Node(gateway, tmp_path / "later", plan, rank=int(other == "rank"), is_spread=other != "local")
    assert node.start() == "" and node.files == {}


def test_the_key_has_all_that_compiled_code_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    own = key(PLAN, 0, "/a/vllm-0.33.0/H100-580")
    assert key(PLAN, 0, "/other/home/vllm-0.33.0/H100-580") == own
    others = {key(PLAN, 0, "/a/vllm-0.34.0/H100-580"), key(PLAN, 0, "/a/vllm-0.33.0/H100-590"), key(PLAN, 1, "/a/b")}
    monkeypatch.setattr(shared_cache, "_cpu_flags", lambda: "flags: fpu")
    assert len(others | {own, key(PLAN, 0, "/a/vllm-0.33.0/H100-580")}) == 5


@contextlib.contextmanager
def giving(gateway: Gateway, folder: Path, listing: Listing, **changes: Any) -> Iterator[FileServer]:
    """A node of the run that gives what a test wants, right or wrong."""
    server, name = FileServer(changes.pop("server_key", gateway.engine_key)), changes.pop("posted_as", listing.commit)
    server.give(listing, Layout(folder))
    server.start()
    digest = hashlib.sha256(msgspec.json.encode(listing)).hexdigest()
    holder = msgspec.structs.replace(Holder("evil", (f"127.0.0.1:{server.port}",), digest), **changes)
    body = {"replica": f"compiled {name}", "rank": 7, "instance": "evil", "epoch": ""}
    gateway.post_json("/admin/board", body | {"content": {"holder": msgspec.to_builtins(holder)}})
    try:
        yield server
    finally:
        server.close()


OWN = key(PLAN, 0, "/x/vllm-0.33.0/NVIDIA-H100-580")
ZERO, GOOD = "0" * 64, {"a/good.py": RemoteFile(1, hashlib.sha256(b"1").hexdigest())}
UNSAFE = ("../../../out", "/out", "a/../../out", "a//b")


def listing_of(folder: Path, files: dict[str, bytes]) -> Listing:
    for name, body in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(body)
    rows = {name: RemoteFile(len(body), hashlib.sha256(body).hexdigest()) for name, body in files.items()}
    return Listing(Source("folder", "x"), OWN, rows)


def refused(gateway: Gateway, tmp_path: Path, listing: Listing, **changes: Any) -> str:
    """What a node is told of a giver that must not be believed; nothing may come into its folder."""
    node = Node(gateway, tmp_path / "later")
    with giving(gateway, tmp_path / "evil", listing, **changes):
        text = node.start()
    assert list(node.folder.iterdir()) == [] and not (tmp_path / "out").exists()
    assert text.startswith("compiled code of evil was not used: ")
    return text


# What a start says of a giver; what its list has in place of the right things; how it gives.
WRONG: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("not the one that it posted", {}, {"digest": "0" * 64}),
    ("invalid literal", {}, {"addresses": ("127.0.0.1:port",)}),
    ("of another start", {"commit": "0" * 16}, {"posted_as": OWN}),
    ("it answers 401", {}, {"server_key": "of-another-run"}),
    ('"b.py" has not the hash that was posted', {"files": GOOD | {"b.py": RemoteFile(1, ZERO)}}, {}),
    ("too long", {"files": {"a": RemoteFile(2**31, ZERO)}}, {}),
    *((f"unsafe name {name!r}", {"files": {name: RemoteFile(1, ZERO)}}, {}) for name in UNSAFE),
]


@pytest.mark.parametrize(("said", "listed", "given"), WRONG)
def test_a_giver_that_must_not_be_believed_is_refused_and_nothing_of_it_kept(
    gateway: Gateway, tmp_path: Path, said: str, listed: dict[str, Any], given: dict[str, Any]
) -> None:
    listing = msgspec.structs.replace(listing_of(tmp_path / "evil", {"a/good.py": b"1", "b.py": b"2"}), **listed)
    assert said in refused(gateway, tmp_path, listing, **given)


def test_a_full_disk_keeps_nothing_and_too_much_is_not_listed(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = listing_of(tmp_path / "evil", {"a/good.py": b"1", "b.py": b"2"})
    monkeypatch.setattr(paths, "free_bytes", lambda _: 1)
    assert "too little space" in refused(gateway, tmp_path, listing)
    monkeypatch.undo()
    opened = os.open

    def full(path: Any, *args: Any, **more: Any) -> int:
        if str(path).endswith("b.py"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return opened(path, *args, **more)

    monkeypatch.setattr(os, "open", full)
    assert "No space left on device" in refused(gateway, tmp_path, listing)
    monkeypatch.setattr(shared_cache, "_MOST_BYTES", 1)
    with pytest.raises(PenstockError, match="more than 1 B"):
        list_folder(tmp_path / "evil", "k")


def test_a_giver_that_dies_midway_is_left_for_another(
    gateway: Gateway, first: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first that is asked is the one that dies."""
    monkeypatch.setattr(random, "sample", lambda rows, n: sorted(rows, key=lambda row: bool(row.host != "evil")))
    evil = tmp_path / "evil"
    listing = listing_of(evil, {"torch_compile_cache/half.so": b"x" * MIB})
    listing = msgspec.structs.replace(listing, commit=first.cache._key)
    later = Node(gateway, tmp_path / "later")
    with giving(gateway, evil, listing) as server:
        monkeypatch.setattr(server._server.RequestHandlerClass, "_stream", half_stream)
        text: list[str] = []
        thread = threading.Thread(target=lambda: text.append(later.start()), daemon=True)
        thread.start()
        thread.join(30)
    assert text and text[0].startswith("compiled code from ") and later.files == FILES


def half_stream(handler: Any, stream: Any, offset: int, size: int) -> None:
    """Sends half of a file named half.so and hangs up; other files as they are."""
    if stream.name.endswith("half.so"):
        handler.wfile.write(b"x" * (size // 2))
        handler.close_connection = True
    else:
        handler.wfile.write(stream.read()[offset:])


def test_a_giver_that_hangs_or_no_gateway_holds_a_start_for_seconds_and_nothing_comes_afterwards(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_cache, "MOST_S", 0.5)
    monkeypatch.setattr(shared_cache, "_LOOK_S", 0.2)
    silent = Gateway()
    silent.is_down = True
    assert Node(silent, tmp_path / "alone").start() == ""
    goes_on = threading.Event()

    def hang(handler: Any, stream: Any, offset: int, size: int) -> None:
        goes_on.wait(60)
        handler.wfile.write(stream.read())

    listing = listing_of(tmp_path / "evil", {"a.py": b"1"})
    node = Node(gateway, tmp_path / "later")
    with giving(gateway, tmp_path / "evil", listing) as server:
        monkeypatch.setattr(server._server.RequestHandlerClass, "_stream", hang)
        began = time.monotonic()
        assert "it took longer than 500 ms" in node.start()
        assert time.monotonic() - began < 20
        goes_on.set()
        assert node.cache._thread is not None
        node.cache._thread.join(30)
    assert list(node.folder.iterdir()) == []


def test_nodes_of_one_machine_bring_it_once(gateway: Gateway, first: Node, tmp_path: Path) -> None:
    """Two with one folder at once, and what a killed one left is removed."""
    nodes = [Node(gateway, tmp_path / "later") for _ in range(2)]
    (nodes[0].folder / ".incoming" / "triton").mkdir(parents=True)
    (nodes[0].folder / ".incoming" / "triton" / "old").write_bytes(b"old")
    for node in nodes:
        node.cache.begin(str(node.folder))
    for node in nodes:
        node.cache.wait()
    assert sorted(bool(node.cache.text) for node in nodes) == [False, True] and nodes[0].files == FILES


SMI = """#!/bin/sh
case "$*" in *driver_version*) echo "NVIDIA H100 80GB HBM3, 580.65" ;; *) exit 1 ;; esac
"""


@pytest.mark.processes
def test_a_second_replica_starts_with_what_the_first_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real nodes, gateway and HTTP; the engine is the fake one, the GPU a stand-in of nvidia-smi."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text(SMI)
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    rig = Rig(tmp_path, msgspec.structs.replace(PLAN, device="cuda"), is_spread=True)

    def announcement(replica: str) -> Any:
        rows = rig.admin.get_json("/admin/replicas")["replicas"]
        return next((row["announcement"] for row in rows if row["announcement"]["replica"] == replica), None)

    def gives() -> bool:
        markers = [path.name for path in (tmp_path / "home0").rglob(".ready-*")]
        post = {"replica": f"compiled {markers[0][7:] if markers else ''}", "rank": 1, "instance": "test", "epoch": ""}
        posts = rig.admin.post_json("/admin/board", post)["posts"]
        return any(row["post"]["content"].get("holder") for row in posts)

    def start(replica: str) -> Any:
        monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / f"home{replica}"))
        rig.node(0, "--replica", replica)
        rig.until(lambda: (row := announcement(replica)) and row["state"] == "ready", f"replica {replica} is ready")
        return announcement(replica)

    try:
        assert "carried" not in start("0")
        rig.until(gives, "it gives what it compiled")
        time_of_first = announcement("0")["start_s"]["compile"]
        second = start("1")
        assert second["carried"].startswith("compiled code from ") and ": 1 file, 97.7 KiB in" in second["carried"]
        assert second["start_s"]["compile"] < time_of_first / 2, second["start_s"]
        log = (tmp_path / "log").read_text("utf-8")
        assert log.count("torch.compile took") == 1 and log.count("Directly load AOT compilation") == 1
    finally:
        rig.stop()
        rig.close()
    assert processes.sweep(str(rig.run)) == [], "nothing is left of the nodes"


def test_strangers_get_few_connections_for_a_short_time_and_no_link_leads_out(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_server, "WAIT_S", 0.0)
    folder, secret = tmp_path / "model", tmp_path / "secret"
    listing = listing_of(folder, {"good": b"1", "linked": b"1", "outside": b"1", "pipe": b"1"})
    secret.write_bytes(b"1")
    for name, target in (("linked", folder / "good"), ("outside", secret)):
        (folder / name).unlink()
        (folder / name).symlink_to(target)
    (folder / "pipe").unlink()
    os.mkfifo(folder / "pipe")
    key = {"Authorization": f"Bearer {gateway.engine_key}"}
    with giving(gateway, folder, listing) as server, contextlib.ExitStack() as stack:

        def status(name: str) -> int:
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=left_s())) as asking:
                asking.request("GET", f"/files/{name}", headers=key)
                return asking.getresponse().status

        assert [status(name) for name in ("good", "linked", "outside", "pipe")] == [206, 206, 503, 503]
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), left_s())) for _ in range(40)
        ]
        assert status("good") == 206 and len(server._server.connections) <= file_server._MOST_STRANGERS
        assert strangers[0].recv(1) == b"", "the oldest gave way"
        monkeypatch.setattr(file_server, "_STRANGER_S", 0.0)
        assert strangers[-1].recv(1) == b""
