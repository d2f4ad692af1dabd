"""One copy of the weights to every node, of which the source sends each byte about once, however many nodes there are.

The nodes that bring the same model stand in a line, which the gateway's board shows to all: those that have it whole,
then those that bring it, as they came. Each takes the files from the node before it while that one still receives them,
so the line takes about as long as one node; the first takes them from the source. A node that does not answer is left
out, one that cannot reach the source moves back. `models.fetch` does the rest on each node: partial files, hashes,
manifest, one process per folder.
"""

from __future__ import annotations

import contextlib
import http.client
import secrets
import time
import urllib.parse
from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec

from penstock.errors import PenstockError
from penstock.hardware.network import own_addresses
from penstock.models import sources
from penstock.models.fetch_files import FetchFile, Layout, Peers
from penstock.models.part_file import PartFile
from penstock.models.sources import Listing
from penstock.node.announcer import AdminClient
from penstock.node.file_server import WAIT_S, FileServer
from penstock.node.group.rendezvous import BoardClient

_PIECE_BYTES = 1 << 20
_CONNECT_S = 3.0
_SILENT_S = WAIT_S + 5.0
_JOINING_S = 8.0  # a node that comes and dies without a turn is forgotten within it
_BOARD_S = 30.0  # without a gateway so long, a node goes on alone
_SOURCE_S = 10.0  # so long a node without the source waits for another node
_LEFT_OUT_S = 30.0
_PAUSE_S = 0.2


class Member(msgspec.Struct, frozen=True):
    """A node in the line. `seq`: its turn, 0 until it has one; `n_bytes`: how much of the model it has; `addresses`:
    where it gives files, "host:port", the best first."""

    instance: str
    seq: int
    addresses: tuple[str, ...] = ()
    is_whole: bool = False
    has_source: bool = True
    n_bytes: int = 0

    @property
    def place(self) -> tuple[bool, bool, int, str]:
        """Sorts members as they stand in the line."""
        return not self.is_whole, not self.has_source, self.seq, self.instance


def before(own: Member, others: Sequence[Member], left_out: Collection[str] = ()) -> Member | None:
    """The member that `own` takes the files from, the last one before it; None: from the source. Pure."""
    ahead = [member for member in others if member.seq and member.instance not in left_out and member.place < own.place]
    return max(ahead, key=lambda member: member.place, default=None)


class Line(Peers):
    """This node in the line of one model. `is_stopped` ends every wait, by a PenstockError."""

    def __init__(self, admin: AdminClient, name: str, is_stopped: Callable[[], bool]) -> None:
        self._admin, self._is_stopped = admin, is_stopped
        # Any number: two nodes with the same one would overwrite each other's posts.
        self._board = BoardClient(admin, f"stage {name}", secrets.randbelow(2**31), lambda: None)
        self._server = FileServer(admin.engine_key)
        self._own = Member(self._board.instance, 0)
        self._left_out: dict[str, float] = {}
        self._givers: dict[str, Member] = {}

    def listing(self, resolve: Callable[[], Listing]) -> Listing:
        self._join()
        deadline = time.monotonic() + _SOURCE_S
        while True:
            self._check_stopped()
            if (giver := self._before()) is not None:
                if (listing := self._ask_listing(giver)) is not None:
                    return listing
            else:
                try:
                    return resolve()
                except PenstockError as exc:
                    self._change(has_source=False)
                    may_come = exc.is_retryable or self._others_have_source()
                    if time.monotonic() > deadline or not may_come:
                        raise
            time.sleep(_PAUSE_S)

    def begin(self, listing: Listing, layout: Layout) -> None:
        self._server.give(listing, layout)
        self._listing, self._layout = listing, layout
        self.count()

    def fetch_file(self, listing: Listing, name: str, part: PartFile, from_source: FetchFile) -> None:
        size = listing.files[name].size
        while part.n_bytes < size:
            self._check_stopped()
            if (giver := self._before()) is not None:
                self._givers[name] = giver
                self._receive(giver, name, size, part)
            else:
                self._givers.pop(name, None)
                try:
                    from_source(listing, name, part)
                    return
                except PenstockError as exc:
                    if not self._can_wait(exc):
                        raise
            if part.n_bytes < size:
                time.sleep(_PAUSE_S)

    def confirm(self, listing: Listing, name: str, digest: str) -> None:
        giver = self._givers.get(name)
        if giver is None:
            return
        theirs = digest
        broken = contextlib.suppress(OSError, http.client.HTTPException)
        with broken, self._ask(giver, f"/digests/{quoted(name)}") as answer:
            theirs = answer.read().decode("ascii", "replace") if answer.status == 200 else digest
        if theirs != digest:
            message = f'could not stage "{name}": it was damaged on the way from {giver.addresses[0]}'
            raise PenstockError(message, is_retryable=True)

    def finish(self) -> None:
        self._change(is_whole=True, n_bytes=self._listing.n_bytes)

    def count(self) -> None:
        """Let the others know how much is here."""
        n_bytes = self._listing.n_bytes - sum(self._layout.missing(self._listing).values())
        self._change(n_bytes=n_bytes + self._layout.n_partial_bytes(self._listing))

    def _join(self) -> None:
        """Stand at the end of the line; alone where no gateway answers."""
        if self._own.seq:
            return
        self._server.start()
        self._board.start()
        self._change(addresses=addresses_of(self._server, self._admin))
        self._board.wait_posted(_BOARD_S)
        self._check_stopped()
        self._change(seq=1 + max((member.seq for member in self._others()), default=0))
        self._board.wait_posted(_BOARD_S)
        # Of two that come together each sees the other without a turn, or with one: none takes itself for the first.
        deadline = time.monotonic() + _JOINING_S
        while time.monotonic() < deadline and any(not member.seq for member in self._others()):
            self._check_stopped()
            time.sleep(_PAUSE_S)

    def _change(self, **fields: object) -> None:
        self._own = msgspec.structs.replace(self._own, **fields)
        self._board.post("", phase="whole" if self._own.is_whole else "partial", member=self._own)

    def _others(self) -> list[Member]:
        rows = []
        for row in self._board.posts().values():
            with contextlib.suppress(msgspec.ValidationError):
                rows.append(msgspec.convert(row.post.content.get("member"), Member))
        return rows

    def _before(self) -> Member | None:
        now = time.monotonic()
        left_out = [instance for instance, until in self._left_out.items() if now < until]
        return before(self._own, self._others(), left_out)

    def _others_have_source(self) -> bool:
        return any(member.has_source for member in self._others())

    def _can_wait(self, error: PenstockError) -> bool:
        """After the source failed: whether another node may have what this one cannot reach."""
        if not error.is_retryable or not self._others_have_source():
            return False
        self._change(has_source=False)
        return True

    def _check_stopped(self) -> None:
        if self._is_stopped():
            raise PenstockError("the node is stopped")

    def _leave_out(self, member: Member) -> None:
        self._left_out[member.instance] = time.monotonic() + _LEFT_OUT_S

    def _ask_listing(self, giver: Member) -> Listing | None:
        try:
            with self._ask(giver, "/listing") as answer:
                if answer.status != 200:
                    return None
                listing = msgspec.json.decode(answer.read(), type=Listing)
        except (OSError, http.client.HTTPException, msgspec.MsgspecError):
            self._leave_out(giver)
            return None
        sources.check_names(str(listing.source), listing.files)
        return listing

    def _receive(self, giver: Member, name: str, size: int, part: PartFile) -> None:
        """Add what the giver sends of the rest of a file.  Raises OSError of the disk."""
        for piece in self._pieces(giver, name, part.n_bytes):
            part.write(piece)
        ahead = (other for other in self._others() if other.seq and other.place < giver.place)
        if part.n_bytes < size and any(other.n_bytes > giver.n_bytes for other in ahead):
            self._leave_out(giver)  # it stands still, and others before it do not

    def _pieces(self, giver: Member, name: str, offset: int) -> Iterator[memoryview]:
        """What the giver sends of a file from `offset` on, until it ends or breaks off."""
        buffer = memoryview(bytearray(_PIECE_BYTES))
        try:
            with self._ask(giver, f"/files/{quoted(name)}", offset) as answer:
                while answer.status == 206 and (n_bytes := answer.readinto(buffer)):
                    yield buffer[:n_bytes]
                if answer.status not in (206, 503):
                    self._leave_out(giver)
        except TimeoutError:
            return  # it waits for bytes itself
        except (OSError, http.client.HTTPException):
            self._leave_out(giver)

    @contextlib.contextmanager
    def _ask(self, giver: Member, path: str, offset: int = 0) -> Iterator[http.client.HTTPResponse]:
        """The answer of the first of its addresses that connects.  Raises OSError, HTTPException."""
        with contextlib.closing(connect(giver.addresses)) as connection:
            headers = {"Authorization": f"Bearer {self._admin.engine_key}", "Range": f"bytes={offset}-"}
            connection.request("GET", path, headers=headers)
            with connection.getresponse() as answer:
                yield answer


def addresses_of(server: FileServer, admin: AdminClient) -> tuple[str, ...]:
    """Where other nodes reach a server of this node, "host:port" each, the best first. Blocks."""
    host = admin.own_address()
    addresses = own_addresses([host] if host is not None and not host.startswith("127.") else [])
    return tuple(f"{address}:{server.port}" for address in addresses)


def connect(addresses: Sequence[str]) -> http.client.HTTPConnection:
    """A connection to the first of these addresses that takes one.  Raises OSError."""
    error: OSError | None = None
    for address in addresses:
        host, _, port = address.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=_CONNECT_S)
        try:
            connection.connect()
        except OSError as exc:
            error = exc
            continue
        connection.sock.settimeout(_SILENT_S)
        return connection
    raise error or OSError("it has no address")


def quoted(name: str) -> str:
    return urllib.parse.quote(name, safe="")
