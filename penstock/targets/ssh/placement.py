"""The nodes of one run on its hosts: which hosts a replica takes, how its nodes start, and how they end."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from penstock import paths, processes, run_folder
from penstock.errors import PenstockError
from penstock.hardware import visible
from penstock.hardware.network import free_lasting_ports
from penstock.run_folder import Run
from penstock.spec.blocks import Ssh as Block
from penstock.targets import LeftBehind, Placement
from penstock.targets.openssh import Ssh, at_once, failed, short_name
from penstock.targets.ssh.agent import End, Ended, Start, Started
from penstock.targets.ssh.install import PreparedHost
from penstock.targets.ssh.liveness import Look, Watch
from penstock.targets.ssh.tunnels import Tunnel, Tunnels
from penstock.wire.announcement import Process

_START_S = 60.0
_END_MARGIN_S = 30.0
_BOTH_FILES = 'tail -n +1 "$0.1" 2>/dev/null; tail -n +1 "$0"'  # of a log, which its node bounds
_PASSED_ON = ("HF_TOKEN", "HF_ENDPOINT", "HUGGING_FACE_HUB_TOKEN")


class Node(msgspec.Struct, frozen=True):
    """One node of a replica. `folder`: of the run, on its host. `port`: of its engine there. `announce`: leads from
    there to our admin address. `local`: leads from here to the engine; None for all but the first node."""

    host: str
    name: str
    folder: str
    python: str
    process: Process
    boot: str
    port: int
    announce: int
    local: int | None = None

    def lives(self, looks: Mapping[str, Look]) -> bool:
        return self.host in looks and looks[self.host].has(self.process, self.boot)


class RunPlace(msgspec.Struct, frozen=True):
    """Where a run may have something on a host: noted before anything is started there."""

    host: str
    python: str
    folder: str


def assign(
    hosts: Sequence[str], n_nodes: int, replicas: Sequence[str], existing: Mapping[str, Sequence[str]]
) -> dict[str, tuple[str, ...]]:
    """The hosts of each replica by rank: those it has, else those with the fewest replicas, in the file's order. Pure.

    Three hosts, two nodes a replica: replica 0 takes the first and second, replica 1 the first and third.
    """
    chosen = {replica: tuple(existing[replica]) for replica in replicas if replica in existing}
    uses = Counter(host for taken in chosen.values() for host in taken)
    for replica in replicas:
        if replica not in chosen:
            best = sorted(range(len(hosts)), key=lambda at: (uses[hosts[at]], at))[:n_nodes]
            chosen[replica] = tuple(hosts[at] for at in sorted(best))
            uses.update(chosen[replica])
    return chosen


def log_name(replica: str, rank: int) -> str:
    """The log of a node, in the run's folder on its host."""
    return f"logs/replica-{replica}-{rank}.log"


class RunHosts:
    """One run: what is kept between two calls, and what is done on its hosts."""

    def __init__(self, run: Run) -> None:
        self.run, self.run_id = run, run.record().id
        self.block = run.deployment().ssh or Block()
        marks = processes.marks(str(run.path), self.run_id, "ssh")
        self.ssh = Ssh(self.block.config, self.run_id, marks)
        self.watch = Watch(self.ssh)
        self._tunnels = Tunnels(self.ssh, run.path / "tunnels", marks)
        self._ending: set[str] = set()
        self._places_file = run.path / "hosts.json"

    def keep_tunnels(self, replica: str, nodes: Sequence[Node]) -> None:
        """Start the tunnels of a replica that do not run, unless it was told to end."""
        admin = int(self.run.admin_url.rpartition(":")[2])
        for rank, node in enumerate(nodes if replica not in self._ending else ()):
            self._tunnels.keep(
                Tunnel(node.host, replica, rank, node.python, node.announce, admin, node.local, node.port)
            )

    def placement(self, replica: str, nodes: Sequence[Node], looks: Mapping[str, Look]) -> Placement:
        """Where a replica is, from what is known of its hosts."""
        now, reasons, n_gone = time.monotonic(), [], 0
        for node in nodes:
            look, name = looks[node.host], short_name(node.host)
            if look.is_away(now):
                reasons.append(look.error or f"{name} does not answer")
            elif not node.lives(looks):
                n_gone += 1
                gone = f"its node process {node.process.pid} on {name} is gone"
                reasons.append(gone if look.boot == node.boot else f"{name} was restarted")
        if reasons:
            return Placement("gone" if n_gone == len(nodes) else "broken", "; ".join(reasons))
        for rank, node in enumerate(nodes):
            trouble = self._tunnels.trouble(replica, rank)
            if trouble is not None:
                return Placement("placed", f"the tunnel to {short_name(node.host)} is down: {trouble}")
        return Placement("placed")

    # ---- the start ---------------------------------------------------------------------------------------------------

    def keep(self, replica: str) -> None:
        """A replica that was told to end, and could not be, is wanted again."""
        self._ending.discard(replica)

    def place(
        self, replica: str, prepared: Sequence[PreparedHost], before: Sequence[Node] | None, looks: Mapping[str, Look]
    ) -> tuple[Node, ...]:
        """Start the nodes of a replica that are not there.  Raises PenstockError when that brought nothing."""
        hosts = [there.host for there in prepared]
        for host in hosts if before else ():
            error = looks[host].error if host in looks else short_name(host)
            if error is not None:
                raise PenstockError(f"could not place replica {replica}: {error}", is_retryable=True)
        self.keep(replica)
        self.run.log(f"replica-{replica}").unlink(missing_ok=True)
        known = {place.host: place for place in self._places()}
        known |= {there.host: RunPlace(there.host, there.python, self._folder(there)) for there in prepared}
        paths.write_atomically(self._places_file, msgspec.json.encode(list(known.values())))
        local = before[0].local if before else free_lasting_ports(1)[0]
        ranks = {host: rank for rank, host in enumerate(hosts) if before is None or not before[rank].lives(looks)}
        answers = at_once(list(ranks), lambda host: self._start(replica, ranks[host], prepared, local, before))
        self.watch.forget(hosts)
        errors = [answer for answer in answers.values() if isinstance(answer, PenstockError)]
        started = {host: answer for host, answer in answers.items() if isinstance(answer, Node)}
        if errors and (before is None or not started):
            self._end_on(self._by_host(started.values()), replica, 0.0)
            raise errors[0]
        nodes = tuple(started.get(host) or (before or ())[rank] for rank, host in enumerate(hosts))
        self.keep_tunnels(replica, nodes)
        return nodes

    def _start(
        self,
        replica: str,
        rank: int,
        prepared: Sequence[PreparedHost],
        local: int | None,
        before: Sequence[Node] | None,
    ) -> Node:
        there, artifact, ids = prepared[rank], self.run.artifact(), self.run.deployment().hardware.gpu_ids
        folder = self._folder(there)
        words = {
            "{python}": there.python,
            "{replica}": replica,
            "{rank}": str(rank),
            "{hosts}": ",".join(short_name(each.host) for each in prepared),
            "{url}": f"http://127.0.0.1:{local}",
            "{run}": folder,
        }
        message = Start(
            folder=folder,
            run_id=self.run_id,
            replica=replica,
            rank=rank,
            argv=tuple(_filled(word, words) for word in artifact.argv),
            log=log_name(replica, rank),
            files={f"artifact/{name}": _filled(text, words) for name, text in artifact.files.items()}
            | {"run.json": (self.run.path / "run.json").read_text("utf-8")}
            | {"secrets/admin-token": self.run.admin_token()},
            environment={name: os.environ[name] for name in _PASSED_ON if os.environ.get(name)} | visible(ids or ()),
            ports=(before[rank].port, before[rank].announce) if before else None,
            local=local if rank == 0 else None,
        )
        answer = _ask_agent(self.ssh, there.host, there.python, "start", msgspec.json.encode(message), _START_S)
        node = msgspec.json.decode(answer, type=Started)
        return Node(
            there.host, node.host, folder, there.python, node.process, node.boot, node.port, node.announce, node.local
        )  # fmt: skip

    def _folder(self, there: PreparedHost) -> str:
        return f"{there.folder}/remote/{self.run.name}-{self.run_id}"

    # ---- the end -----------------------------------------------------------------------------------------------------

    def end_unnoted(self, replica: str) -> None:
        """End a replica that a controller may have started and, killed, did not note.  Raises PenstockError."""
        errors = self._end_on(self._by_host(()), replica, 0.0)
        for error in errors.values():
            raise error
        self._tunnels.end(replica)

    def end_replica(self, replica: str, nodes: Sequence[Node]) -> None:
        """End one replica: its node drains its engine, for as long as the plan says.

        Raises PenstockError when a host could not be reached, so that its node lives on.
        """
        self._ending.add(replica)
        errors = self._end_on(self._by_host(nodes), replica, self.run.plan().drain_s + 15)
        away = {node.host: errors[node.host] for node in nodes if node.host in errors}  # others have nothing of it
        if away:
            raise PenstockError(
                f"could not end replica {replica} on {', '.join(map(short_name, away))}: "
                f"{next(iter(away.values())).message}",
                hint="It is tried again until the host is back.",
                is_retryable=True,
            )
        self._keep_log(replica, nodes)
        self._tunnels.end(replica)
        self.watch.forget([node.host for node in nodes])

    def end_all(self, entries: Mapping[str, Sequence[Node]], grace_s: float) -> None:
        """End everything, everywhere.  Raises LeftBehind for hosts that could not be reached, when all else is done."""
        self._ending |= set(entries)
        places = self._by_host([node for nodes in entries.values() for node in nodes])
        away = self._end_on(places, None, grace_s)
        for name, nodes in entries.items():
            self._keep_log(name, nodes, away)
        at_once(
            [host for host in places if host not in away],
            lambda host: self.ssh.run(host, ["rm", "-rf", places[host][0].folder]),
        )
        self._tunnels.end()
        self.watch.forget(list(places))
        self.ssh.close(list(places))
        for host, (place, _) in places.items():
            if host in away:
                what = f"{self.run.name} on {short_name(host)}, which could not be reached"
                facts = {"place": msgspec.to_builtins(place), "config": self.block.config, "run_id": self.run_id}
                try:
                    run_folder.note_left(run_folder.Left("ssh", self.run_id, host, what, facts))
                except OSError as exc:  # the run keeps its places, so that `down` can be repeated
                    raise PenstockError(f"could not note that {what}: {exc.strerror}", is_retryable=True) from exc
            else:
                run_folder.forget_left(self.run_id, host)
        if away:
            raise LeftBehind(
                f"could not end what runs on {', '.join(map(short_name, away))}: {next(iter(away.values())).message}",
                hint="It is noted: `penstock clean --yes` ends it when the host is back. "
                f"When the host is gone for good: penstock down {self.run.name} --forget",
                is_retryable=True,
            )

    def _end_on(
        self, places: Mapping[str, tuple[RunPlace, list[Process]]], replica: str | None, grace_s: float
    ) -> dict[str, PenstockError]:
        """End a replica, or all, on all of these hosts at once; the hosts where that failed."""

        def end(host: str) -> None:
            place, nodes = places[host]
            end_there(self.ssh, place, End(place.folder, self.run_id, tuple(nodes), grace_s, replica))

        answers = at_once(list(places), end)
        return {host: answer for host, answer in answers.items() if isinstance(answer, PenstockError)}

    def _keep_log(self, replica: str, nodes: Sequence[Node], away: Collection[str] = ()) -> None:
        """Fetch the log of a replica that has ended from the hosts that answer: from now on it is read from here."""
        parts = []
        for rank, node in enumerate(nodes):
            if node.host in away:
                continue
            with contextlib.suppress(PenstockError):
                words = ["sh", "-c", _BOTH_FILES, f"{node.folder}/{log_name(replica, rank)}"]
                text = self.ssh.check_run(node.host, words, timeout_s=_START_S).text
                front = f"{short_name(node.host)}: " if len(nodes) > 1 else ""
                parts += [f"{front}{line}\n" for line in text.splitlines()]
        if parts:
            with contextlib.suppress(OSError):  # a full disk here: the replica still ends
                self.run.log(f"replica-{replica}").write_text("".join(parts), "utf-8")

    def _by_host(self, nodes: Iterable[Node]) -> dict[str, tuple[RunPlace, list[Process]]]:
        """Every place that was noted, and those of these nodes, with the processes of the nodes there."""
        found: dict[str, tuple[RunPlace, list[Process]]] = {place.host: (place, []) for place in self._places()}
        for node in nodes:
            _, there = found.setdefault(node.host, (RunPlace(node.host, node.python, node.folder), []))
            there.append(node.process)
        return found

    def _places(self) -> list[RunPlace]:
        try:
            return msgspec.json.decode(self._places_file.read_bytes(), type=list[RunPlace])
        except (OSError, msgspec.MsgspecError):
            return []


def end_there(ssh: Ssh, place: RunPlace, message: End) -> None:
    """End on one host what a message names.  Raises PenstockError when something is left."""
    # A host that lost its disk has nothing of ours to end it with, and nothing to end. (The run's own folder says
    # nothing: where hosts share it, another has removed it.)
    if ssh.run(place.host, ["test", "-x", place.python]).code:
        return
    timeout_s = message.grace_s + _END_MARGIN_S
    answer = _ask_agent(ssh, place.host, place.python, "end", msgspec.json.encode(message), timeout_s)
    left = msgspec.json.decode(answer, type=Ended).left
    if left:
        raise PenstockError(f"{', '.join(left)} is left on {short_name(place.host)}")


def _ask_agent(ssh: Ssh, host: str, python: str, verb: str, message: bytes, timeout_s: float) -> bytes:
    done = ssh.run(host, [python, "-m", "penstock.targets.ssh.agent", verb], message, timeout_s)
    line = next((line for line in reversed(done.text.splitlines()) if line.startswith("{")), None)
    if done.code or line is None:
        raise failed(host, f"could not {verb} a node", done)
    if line.startswith('{"problem"'):
        raise failed(host, f"could not {verb} a node", done._replace(err=msgspec.json.decode(line)["problem"]))
    return line.encode()


def _filled(text: str, words: Mapping[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(word, value)
    return text
