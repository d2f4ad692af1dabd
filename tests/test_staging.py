"""Several nodes bring one model: from each other, and about once from its source."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hub_server import COMMIT, HubServer, asked_hub
from samples import demo_plan
from waiting import until

from penstock import paths
from penstock.errors import PenstockError, UserError
from penstock.gateway.board import RankBoard
from penstock.models import fetch, fetch_files, manifest, sources
from penstock.models.fetch_files import Progress
from penstock.models.part_file import PartFile
from penstock.models.sources import Listing, Source
from penstock.node import model_files, peers, staging
from penstock.node.peers import Line, Member, before
from penstock.node.staging import Scratch, Stage, remove_unused
from penstock.run_folder import Launch
from penstock.spec.deployment import Cache
from penstock.text import MIB
from penstock.wire.announcement import Post

pytestmark = pytest.mark.loopback

NAME = "org/tiny"
RANDOM = random.Random(7)
SHARDS = {f"model-0000{n}-of-00003.safetensors": RANDOM.randbytes(3 * MIB + n) for n in (1, 2, 3)}
FILES = {"config.json": b"{}", "tokenizer.json": b"{    }"} | SHARDS
SOURCE = Source("hub", NAME, COMMIT)


class Gateway:
    """The board of a gateway, in this process. `is_down`: it does not answer."""

    engine_key = "key-of-the-run"

    def __init__(self) -> None:
        self.board, self.lock, self.is_down = RankBoard(0.0), threading.Lock(), False

    def post_json(self, path: str, body: Mapping[str, Any]) -> Any:
        if self.is_down:
            raise PenstockError("down", is_retryable=True)
        with self.lock:
            return msgspec.to_builtins(self.board.post(msgspec.convert(body, Post), time.monotonic()))

    def own_address(self) -> str:
        return "127.0.0.1"


class Node:
    """A node that brings the model into a cache of its own, in a thread. `stop` ends it as a kill would."""

    def __init__(self, gateway: Gateway, cache: Path, source: Source = SOURCE) -> None:
        self.cache, self.stopped, self.shown = cache, False, list[Progress]()
        self.line = Line(gateway, str(source), lambda: self.stopped)  # type: ignore[arg-type]
        self.folder: Path | None = None
        self.error: BaseException | None = None
        self._source = source
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.folder = fetch.fetch(self._source, cache=self.cache, peers=self.line, show=self._show)
        except BaseException as exc:  # noqa: BLE001 - the test looks at it
            self.error = exc

    def _show(self, progress: Progress) -> None:
        self.line.count()
        self.shown.append(progress)

    def wait(self) -> Path:
        self.thread.join(60)
        assert self.error is None, self.error
        assert self.folder is not None
        return self.folder

    def stop(self) -> None:
        self.stopped = True
        self.line._server.close()
        self.line._board.post = lambda epoch, **content: None  # type: ignore[method-assign]
        self.line._board._admin = gateway = Gateway()  # type: ignore[assignment]
        gateway.is_down = True


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "own_addresses", lambda _: ["127.0.0.1"])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with asked_hub(monkeypatch, NAME, FILES) as server:
        yield server


@pytest.fixture
def finetuned(tmp_path: Path) -> Path:
    """A folder with the model's files."""
    (folder := tmp_path / "finetuned").mkdir()
    for name, body in FILES.items():
        (folder / name).write_bytes(body)
    return folder


def is_whole(folder: Path) -> bool:
    return manifest.verify(folder) == [] and all((folder / name).read_bytes() == body for name, body in FILES.items())


def test_the_line_is_those_that_are_whole_then_by_turn_then_those_without_the_source() -> None:
    whole, twin, first, own = (Member(name, seq) for name, seq in (("y", 9), ("a", 1), ("z", 1), ("m", 2)))
    whole = msgspec.structs.replace(whole, is_whole=True)
    later, cut_off = Member("b", 3), Member("c", 1, has_source=False)
    line = [whole, twin, first, own, later, cut_off]  # of one turn, by their names
    for place, one in enumerate(line):  # no circle: somebody is before all, and each asks the one before it
        giver = before(one, [other for other in reversed(line) if other is not one])
        assert giver is (line[place - 1] if place else None)
    assert before(own, [whole, first], left_out=["z"]) is whole
    assert before(own, [Member("n", 0)]) is None, "it has no turn yet"


def test_four_nodes_bring_a_model_and_the_hub_sends_it_once(hub: HubServer, tmp_path: Path) -> None:
    gateway = Gateway()
    nodes = [Node(gateway, tmp_path / str(n)) for n in range(4)]
    assert all(is_whole(node.wait()) for node in nodes)
    assert hub.downloads == sorted(FILES)
    late = Node(gateway, tmp_path / "late")
    assert is_whole(late.wait()) and hub.downloads == sorted(FILES), "one that comes later asks those that are whole"
    assert all(entry.n_bytes <= entry.total_bytes for entry in late.shown)
    hub.asked.clear()
    assert is_whole(Node(Gateway(), tmp_path / "late").wait()) and hub.downloads == [], "a copy that fits is kept"


def test_a_folder_that_one_node_has_reaches_the_others_and_damaged_bytes_are_not_kept(
    finetuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, source = Gateway(), Source("folder", str(finetuned))
    copy = Node(gateway, tmp_path / "0", source).wait()
    assert is_whole(copy) and copy != finetuned and not (finetuned / manifest.NAME).exists()
    finetuned.rename(tmp_path / "away")  # the other nodes do not see it
    assert is_whole(Node(gateway, tmp_path / "1", source).wait())
    flipped: list[str] = []
    pieces = Line._pieces

    def damaged(self: Line, giver: Member, name: str, offset: int) -> Iterator[memoryview]:
        for piece in pieces(self, giver, name, offset):
            if name in SHARDS and not flipped:
                flipped.append(name)
                piece[100] ^= 1
            yield piece

    monkeypatch.setattr(Line, "_pieces", damaged)
    assert is_whole(Node(gateway, tmp_path / "2", source).wait()) and flipped


def test_a_node_that_dies_in_the_middle_is_left_out(hub: HubServer, tmp_path: Path) -> None:
    gateway = Gateway()
    hub.is_open.clear()  # no weights come yet
    nodes = [Node(gateway, tmp_path / str(n)) for n in range(3)]
    until(lambda: all(node.line._own.seq for node in nodes), "all stand in the line")
    line = sorted(nodes, key=lambda node: node.line._own.place)
    until(lambda: any("resolve" in words for words in hub.asked), "the first asks the hub")
    until(lambda: set(SHARDS) <= set(line[2].line._givers), "the last asks the one before it")
    line[1].stop()
    hub.is_open.set()
    assert is_whole(line[0].wait()) and is_whole(line[2].wait())
    assert hub.downloads == sorted(FILES), "the last got all of the first"


def test_the_first_dies_and_the_next_goes_on_where_it_is(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = list[tuple[str, int]](), threading.Event()

    def fetch_file(listing: Listing, name: str, part: PartFile) -> None:
        begun.append((name, part.n_bytes))
        while part.n_bytes < len(FILES[name]):
            if part.n_bytes >= MIB:
                goes_on.wait(60)
            part.write(FILES[name][part.n_bytes :][:MIB])

    monkeypatch.setattr(fetch_files, "_fetcher", lambda kind: fetch_file)
    gateway = Gateway()
    first = Node(gateway, tmp_path / "0")
    until(lambda: first.line._own.n_bytes > MIB, "the first has a part")
    second = Node(gateway, tmp_path / "1")
    until(lambda: second.line._own.n_bytes > MIB, "and the second has it too")
    begun.clear()
    first.stop()
    until(lambda: len(begun) == len(SHARDS), "the second asks the source")
    goes_on.set()
    assert is_whole(second.wait()) and set(begun) == {(name, MIB) for name in SHARDS}


def test_a_node_that_does_not_reach_the_hub_gets_all_from_others(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, resolve = Gateway(), sources.resolve
    cut_off: list[int] = []

    def resolve_(*args: Any) -> Any:
        if threading.get_ident() in cut_off:
            raise PenstockError("no route", is_retryable=True)
        return resolve(*args)

    monkeypatch.setattr(sources, "resolve", resolve_)
    lonely = Node(gateway, tmp_path / "0")
    cut_off.append(lonely.thread.ident or 0)
    other = Node(gateway, tmp_path / "1")
    assert is_whole(other.wait()) and is_whole(lonely.wait())
    assert hub.downloads == sorted(FILES)


def test_without_a_gateway_a_node_goes_on_alone_and_an_error_of_the_source_is_told_at_once(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_BOARD_S", 0.2)
    gateway = Gateway()
    gateway.is_down = True
    assert is_whole(Node(gateway, tmp_path / "alone").wait())
    hub.token = "secret"
    node = Node(Gateway(), tmp_path / "other")
    node.thread.join(30)
    assert isinstance(node.error, UserError) and "gated" in node.error.message + (node.error.detail or "")


def test_files_are_given_to_the_deployments_own_nodes_only(hub: HubServer, tmp_path: Path) -> None:
    node = Node(Gateway(), tmp_path)
    node.wait()

    def status(path: str, key: str | None, **headers: str) -> int:
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        connection = http.client.HTTPConnection("127.0.0.1", node.line._server.port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", path, headers=headers)
            return connection.getresponse().status

    key = Gateway.engine_key
    assert status("/files/config.json", key) == 206 and status("/digests/config.json", key) == 200
    assert [status("/listing", wrong) for wrong in (None, "other")] == [401] * 2
    for path in ("/files/..%2f..%2fconfig.json", "/files//etc/passwd", "/files/MANIFEST.json", "/other/config.json"):
        assert status(path, key) == 404
    assert status("/files/config.json", key, Range="bytes=2-") == 416
    assert status("/files/config.json", key, Range="bytes=-5") == 416


def launch(stage: str) -> Launch:
    return Launch("x", demo_plan(), (), "", cache=Cache(stage=stage))


def test_where_the_copy_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def folder(setting: str) -> Path | None:
        return Stage(launch(setting), None, lambda: False)._folder("/models/x")

    monkeypatch.setenv("SCRATCH", str(tmp_path))
    assert folder("none") is None
    assert folder("$SCRATCH/models") == tmp_path / "models"
    for bad in ("$NOT_SET/models", "models"):
        with pytest.raises(UserError, match="cannot stage in"):
            folder(bad)
    monkeypatch.setattr(staging, "_is_remote", lambda _: False)
    assert folder("auto") is None
    monkeypatch.setattr(staging, "_is_remote", lambda _: True)
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path / "job"))
    (tmp_path / "job").mkdir()
    assert folder("auto") == tmp_path / "job" / f"penstock-weights-{os.getuid()}"


@pytest.mark.processes
def test_a_folder_on_scratch_goes_with_its_last_user_also_after_a_kill(tmp_path: Path) -> None:
    place = tmp_path / "weights"
    program = (
        "import time; from pathlib import Path; from penstock.node.staging import Scratch; "
        f"scratch = Scratch(Path({str(place)!r})); print('held', flush=True); time.sleep(600)"
    )
    other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert other.stdout is not None and other.stdout.readline() == b"held\n"
    ours = Scratch(place)
    (place / "model").write_bytes(b"x")
    ours.leave()
    assert (place / "model").exists(), "the other process uses it"
    other.kill()
    other.wait()
    remove_unused(place)
    assert not place.exists()
    remove_unused(place)


def test_auto_reads_in_place_what_cannot_be_copied(
    finetuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = demo_plan()
    plan = msgspec.structs.replace(plan, model=msgspec.structs.replace(plan.model, path=str(finetuned), reference="m"))
    monkeypatch.setattr(staging, "_is_remote", lambda _: True)
    monkeypatch.setattr(staging, "scratch_folders", lambda: iter([tmp_path / "scratch"]))
    with monkeypatch.context() as patch:
        patch.setattr(paths, "free_bytes", lambda _: 0)
        assert model_files.on_this_node(plan, Stage(launch("auto"), None, lambda: False)) is plan
        with pytest.raises(UserError, match="space"):
            model_files.on_this_node(plan, Stage(launch(str(tmp_path / "copies")), None, lambda: False))
    stage = Stage(launch("auto"), None, lambda: False)
    copy = Path(model_files.on_this_node(plan, stage).model.path)
    assert copy.is_relative_to(tmp_path / "scratch") and is_whole(copy)
    stage.close()
    assert not (tmp_path / "scratch").exists()


def test_another_version_of_a_folder_is_another_copy(finetuned: Path, tmp_path: Path) -> None:
    source = Source("folder", str(finetuned))
    first = fetch.fetch(source, cache=tmp_path / "cache")
    assert fetch.fetch(source, cache=tmp_path / "cache") == first
    (finetuned / "config.json").write_bytes(b"[]")
    second = fetch.fetch(source, cache=tmp_path / "cache")
    assert second != first and (second / "config.json").read_bytes() == b"[]"
