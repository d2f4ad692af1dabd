"""Target "ssh": replicas are processes on hosts that are reached by OpenSSH alone, and need nothing but Python.

An engine listens on loopback of its host. A tunnel for each node joins it with this machine: the node announces its
replica through it, the gateway calls the engine through it. So nothing listens beyond loopback, and hosts that only
ssh reaches will do.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from penstock import paths as penstock_paths
from penstock import processes, run_folder
from penstock.errors import PenstockError, Problem
from penstock.hardware import Machine
from penstock.hardware.network import free_lasting_ports
from penstock.run_folder import Artifact, Handle, Launch, Left, Run, Unit, replica
from penstock.spec.blocks import Ssh as Block
from penstock.spec.deployment import DEMO_MODEL, Deployment
from penstock.targets import LeftBehind, Placement, Surveyed, Target
from penstock.targets.openssh import Ssh, at_once, failed, is_legal, short_name
from penstock.targets.ssh import logs as streams
from penstock.targets.ssh.agent_messages import End, Ended, Start, Started
from penstock.targets.ssh.install import Bringer, Contact, look
from penstock.targets.ssh.liveness import Look, Watch
from penstock.targets.ssh.placement import Node, assign
from penstock.targets.ssh.tunnels import Tunnel, Tunnels
from penstock.wire.announcement import Process

_START_S = 60.0
_END_MARGIN_S = 30.0
_KEPT_LOG_BYTES = 32 * 1024 * 1024
_PASSED_ON = ("HF_TOKEN", "HF_ENDPOINT", "HUGGING_FACE_HUB_TOKEN")


class _Place(msgspec.Struct, frozen=True):
    """Where a run may have something on a host: noted before anything is started there."""

    host: str
    python: str
    folder: str


class _Room:
    """One run: what is kept between two calls, and what is done on its hosts."""

    def __init__(self, run: Run) -> None:
        self.run, self.run_id = run, run.record().id
        self.block = _block(run.deployment())
        marks = processes.marks(str(run.path), self.run_id, "ssh")
        self.ssh = Ssh(self.block.config, self.run_id, marks)
        self.watch = Watch(self.ssh)
        self.tunnels = Tunnels(self.ssh, run.path / "tunnels", marks)
        self.ending: set[str] = set()

    def tunnel(self, replica: str, rank: int, node: Node) -> Tunnel:
        admin = int(self.run.admin_url.rpartition(":")[2])
        return Tunnel(node.host, replica, rank, node.python, node.announce, admin, node.local, node.port)

    def placement(self, replica: str, nodes: Sequence[Node], looks: Mapping[str, Look]) -> Placement:
        """Where a replica is, from what is known of its hosts."""
        now, why, n_gone = time.monotonic(), [], 0
        for node in nodes:
            seen = looks[node.host]
            if seen.is_away(now):
                why.append(seen.error or f"{short_name(node.host)} does not answer")
            elif not _lives(node, looks):
                n_gone += 1
                why.append(_how_gone(node, seen))
        if why:
            return Placement("gone" if n_gone == len(nodes) else "broken", "; ".join(why))
        for rank, node in enumerate(nodes):
            trouble = self.tunnels.trouble(replica, rank)
            if trouble is not None:
                return Placement("placed", f"the tunnel to {short_name(node.host)} is down: {trouble}")
        return Placement("placed")

    def place(
        self, replica: str, contacts: Sequence[Contact], before: Sequence[Node] | None, looks: Mapping[str, Look]
    ) -> tuple[Node, ...]:
        """Start the nodes of a replica that are not there.  Raises PenstockError when that brought nothing."""
        for node in before or ():
            seen = looks.get(node.host)
            if seen is None or seen.error is not None:
                raise PenstockError(
                    f"could not place replica {replica}: {seen.error if seen else short_name(node.host)}",
                    is_retryable=True,
                )
        self.ending.discard(replica)
        self.run.log(f"replica-{replica}").unlink(missing_ok=True)
        self._note_places(contacts)
        local = before[0].local if before else free_lasting_ports(1)[0]
        ranks = [rank for rank in range(len(contacts)) if before is None or not _lives(before[rank], looks)]
        hosts = [contact.host for contact in contacts]
        found = at_once(
            [hosts[rank] for rank in ranks],
            lambda host: self._start(replica, hosts.index(host), contacts, local, before),
        )
        self.watch.forget(hosts)
        errors = [told for told in found.values() if isinstance(told, PenstockError)]
        started = {host: told for host, told in found.items() if isinstance(told, Node)}
        if errors and (before is None or not started):
            self._end_on(_by_host(self._places(), started.values()), replica, 0.0)
            raise errors[0]
        nodes = tuple(started.get(host) or (before or ())[rank] for rank, host in enumerate(hosts))
        for rank, node in enumerate(nodes):
            self.tunnels.keep(self.tunnel(replica, rank, node))
        return nodes

    def _start(
        self, replica: str, rank: int, contacts: Sequence[Contact], local: int | None, before: Sequence[Node] | None
    ) -> Node:
        contact, artifact = contacts[rank], self.run.artifact()
        folder = self._folder(contact)
        words = {
            "{python}": contact.python,
            "{replica}": replica,
            "{rank}": str(rank),
            "{hosts}": ",".join(short_name(one.host) for one in contacts),
            "{url}": f"http://127.0.0.1:{local}",
            "{run}": folder,
        }
        order = Start(
            folder=folder,
            run_id=self.run_id,
            replica=replica,
            rank=rank,
            argv=tuple(_filled(word, words) for word in artifact.argv),
            log=_log_name(replica, rank),
            files={f"artifact/{name}": _filled(text, words) for name, text in artifact.files.items()}
            | {"run.json": (self.run.path / "run.json").read_text("utf-8")},
            secrets={"secrets/admin-token": self.run.admin_token()},
            environment={name: os.environ[name] for name in _PASSED_ON if os.environ.get(name)},
            ports={"port": before[rank].port, "announce": before[rank].announce} if before else {},
        )
        told = _tell(self.ssh, contact.host, contact.python, "start", msgspec.json.encode(order), _START_S)
        made = msgspec.json.decode(told, type=Started)
        return Node(
            contact.host, made.host, folder, contact.python, made.process, made.boot, made.port, made.announce,
            local if rank == 0 else None,
        )  # fmt: skip

    def _folder(self, contact: Contact) -> str:
        return f"{contact.folder}/remote/{self.run.name}-{self.run_id}"

    # ---- the end -----------------------------------------------------------------------------------------------------

    def end_replica(self, replica: str, nodes: Sequence[Node]) -> None:
        """End one replica: its node drains its engine, for as long as the plan says.

        Raises PenstockError when a host could not be reached, and its node lives on.
        """
        self.ending.add(replica)
        told = self._end_on(_by_host(self._places(), nodes), replica, self.run.plan().drain_s + 15)
        away = {node.host: told[node.host] for node in nodes if node.host in told}  # others have nothing of it
        if away:
            raise PenstockError(
                f"could not end replica {replica} on {', '.join(map(short_name, away))}: "
                f"{next(iter(away.values())).message}",
                hint="It is tried again until the host is back.",
                is_retryable=True,
            )
        self._keep_log(replica, nodes)
        self.tunnels.end(replica)
        self.watch.forget([node.host for node in nodes])

    def end_all(self, entries: Mapping[str, Sequence[Node]], grace_s: float) -> None:
        """End everything, everywhere.  Raises LeftBehind for hosts that could not be reached, when all else is done."""
        nodes = [node for replica in entries.values() for node in replica]
        self.ending |= set(entries)
        places = _by_host(self._places(), nodes)
        away = self._end_on(places, None, grace_s)
        for name, replica_nodes in entries.items():
            self._keep_log(name, replica_nodes, away)
        at_once(
            [host for host in places if host not in away],
            lambda host: self.ssh.run(host, ["rm", "-rf", places[host][0].folder]),
        )
        self.tunnels.end()
        self.watch.forget(list(places))
        self.ssh.close(list(places))
        for host, (place, _) in places.items():
            if host in away:
                what = f"{self.run.name} on {short_name(host)}, which could not be reached"
                facts = {"place": msgspec.to_builtins(place), "config": self.block.config, "run_id": self.run_id}
                run_folder.note_left(run_folder.Left("ssh", self.run_id, host, what, facts))
            else:
                run_folder.forget_left(self.run_id, host)
        if away:
            raise LeftBehind(
                f"could not end what runs on {', '.join(map(short_name, away))}: {next(iter(away.values())).message}",
                hint="It is noted: `penstock clean --yes` ends it when the host is back.",
                is_retryable=True,
            )

    def _end_on(
        self, places: Mapping[str, tuple[_Place, list[Process]]], replica: str | None, grace_s: float
    ) -> dict[str, PenstockError]:
        """End a replica, or all, on all of these hosts at once; the hosts where that failed."""

        def end(host: str) -> None:
            place, nodes = places[host]
            _end_there(self.ssh, place, End(place.folder, self.run_id, tuple(nodes), grace_s, replica))

        found = at_once(list(places), end)
        return {host: told for host, told in found.items() if isinstance(told, PenstockError)}

    def _keep_log(self, replica: str, nodes: Sequence[Node], away: Collection[str] = ()) -> None:
        """Fetch the log of a replica that has ended, but for hosts that are away: it is read from here from now on."""
        parts = []
        for rank, node in enumerate(nodes):
            if node.host in away:
                continue
            with contextlib.suppress(PenstockError):
                words = ["tail", "-c", str(_KEPT_LOG_BYTES), f"{node.folder}/{_log_name(replica, rank)}"]
                text = self.ssh.check_run(node.host, words, timeout_s=_START_S).text
                front = f"{short_name(node.host)}: " if len(nodes) > 1 else ""
                parts += [f"{front}{line}\n" for line in text.splitlines()]
        if parts:
            self.run.log(f"replica-{replica}").write_text("".join(parts), "utf-8")

    @property
    def _places_file(self) -> Path:
        return self.run.path / "hosts.json"

    def _places(self) -> list[_Place]:
        try:
            return msgspec.json.decode(self._places_file.read_bytes(), type=list[_Place])
        except (OSError, msgspec.MsgspecError):
            return []

    def _note_places(self, contacts: Sequence[Contact]) -> None:
        known = {place.host: place for place in self._places()}
        known |= {one.host: _Place(one.host, one.python, self._folder(one)) for one in contacts}
        penstock_paths.write_atomically(self._places_file, msgspec.json.encode(list(known.values())))


class OverSsh(Target):
    name = "ssh"
    capabilities = frozenset({"survey"})

    def __init__(self) -> None:
        self._rooms: dict[str, _Room] = {}
        self._before_run: dict[str | None, Ssh] = {}
        self._contacts: dict[tuple[Block, str], Contact] = {}
        self._lock = threading.Lock()

    # ---- before a run ------------------------------------------------------------------------------------------------

    def check(self, deployment: Deployment, is_rehearsal: bool = False) -> list[Problem]:
        block = deployment.ssh or Block()
        problems = _problems(deployment, block)
        if problems:
            return problems
        paths = _paths_of(deployment)
        ssh = self._program(block)
        found = at_once(block.hosts, lambda host: look(ssh, host, block, paths))
        for number, host in enumerate(block.hosts):
            told = found[host]
            where = f"ssh.hosts[{number}]"
            if isinstance(told, PenstockError):
                problems.append(Problem(where, told.message, told.hint))
            elif told.absent:
                hint = "put it on a file system that all hosts have at this path, or use a hub id"
                problems.append(Problem("model", f'{told.absent[0]} is not on "{short_name(host)}"', hint))
        return problems

    def machines(self, deployment: Deployment) -> list[Machine]:
        told = self.survey(deployment, ["-m", "penstock.hardware.node_facts"], timeout_s=60.0)
        found = []
        for one in told:
            if one.exit_code != 0:
                raise PenstockError(
                    f"could not survey {one.host}: {(one.err.strip().splitlines() or ['no answer'])[-1]}",
                    hint="Does `ssh HOST` work by hand?",
                    is_retryable=True,
                )
            line = next((line for line in reversed(one.out.splitlines()) if line.startswith("{")), "{}")
            found.append(msgspec.json.decode(line, type=_Told).machine)
        return found

    def survey(self, deployment: Deployment, argv: Sequence[str], timeout_s: float) -> list[Surveyed]:
        block = _block(deployment)
        ssh, contacts = self._program(block), self._bring(deployment, block.hosts)

        def ask(host: str) -> Surveyed:
            rank = str(block.hosts.index(host))
            words = [contacts[host].python, *(word.replace("{rank}", rank) for word in argv)]
            done = ssh.run(host, words, timeout_s=timeout_s)
            return Surveyed(short_name(host), done.code, done.text, done.err)

        told = at_once(block.hosts, ask)
        return [
            Surveyed(short_name(host), None, err=one.message) if isinstance(one, PenstockError) else one
            for host, one in told.items()
        ]

    def nodes_per_machine(self, deployment: Deployment, handle: Handle, n_more: int = 0) -> list[int]:
        hosts = _block(deployment).hosts
        placed = {replica: [node.host for node in _nodes(entry)] for replica, entry in handle.replicas.items()}
        more = [f"+{number}" for number in range(n_more)]
        assigned = assign(hosts, deployment.hardware.nodes, [*placed, *more], placed)
        uses = Counter(host for taken in assigned.values() for host in taken)
        return [uses[host] for host in hosts]

    def render(self, launch: Launch, python: str, deployment: Deployment) -> Artifact:
        there = msgspec.structs.replace(launch, token_file="{run}/secrets/admin-token")
        text = msgspec.json.format(msgspec.json.encode(there), indent=2).decode()
        argv = [
            *("{python}", "-m", "penstock.node", "{run}/artifact/launch.json", "--replica", "{replica}"),
            *("--rank", "{rank}", "--hosts", "{hosts}", "--port", "{port}", "--url", "{url}"),
            *("--announce", "http://127.0.0.1:{announce}", "--claim-gpus"),
        ]
        return Artifact(tuple(argv), {"launch.json": text + "\n"})

    # ---- a run -------------------------------------------------------------------------------------------------------

    def status(self, run: Run) -> dict[Unit, Placement]:
        room, entries = self._room(run), _entries(run)
        looks = room.watch.see(_pids_by_host(entries))
        return {replica(name): room.placement(name, nodes, looks) for name, nodes in entries.items()}

    def logs(self, run: Run, unit: Unit, follow: bool, last: int | None = None) -> Iterator[str]:
        kept, nodes = f"replica-{unit.name}", _entries(run).get(unit.name)
        if nodes is None or run.log(kept).exists():  # it has ended, and its log was fetched
            return run.log_lines(kept, follow, last)
        sources = [
            streams.Source(node.host, node.python, f"{node.folder}/{_log_name(unit.name, rank)}")
            for rank, node in enumerate(nodes)
        ]
        return streams.lines(self._room(run).ssh, sources, follow, last)

    def place(self, run: Run, units: Collection[Unit]) -> Handle:
        room, entries = self._room(run), _entries(run)
        before, wanted = dict(entries), sorted(unit.name for unit in units)
        problems: list[PenstockError] = []
        for name in [name for name in entries if name not in wanted]:
            try:
                room.end_replica(name, entries[name])
                del entries[name]
            except PenstockError as exc:  # it holds its GPUs until its host is back: it stays known, and is tried again
                problems.append(exc)
        looks = room.watch.see_now(_pids_by_host(entries))
        hosts_of = assign(
            room.block.hosts, run.deployment().hardware.nodes, [*wanted, *(set(entries) - set(wanted))],
            {name: [node.host for node in nodes] for name, nodes in entries.items()},
        )  # fmt: skip
        for name in wanted:
            nodes = entries.get(name)
            if nodes is not None and all(_lives(node, looks) for node in nodes):
                room.ending.discard(name)  # it was to be ended, and could not be
                continue
            try:
                contacts = self._bring(run.deployment(), hosts_of[name])
                entries[name] = room.place(name, [contacts[host] for host in hosts_of[name]], nodes, looks)
            except PenstockError as exc:
                # What is known to be gone may come back another time; the others are not made to wait for it.
                self._forget(hosts_of[name])
                problems.append(exc)
        if problems and entries == before:
            raise problems[0]
        return Handle(
            self.name, {replica(name).key: {"nodes": msgspec.to_builtins(nodes)} for name, nodes in entries.items()}
        )

    def keep_up(self, run: Run) -> None:
        room = self._room(run)
        for name, nodes in _entries(run).items():
            if name not in room.ending:
                for rank, node in enumerate(nodes):
                    room.tunnels.keep(room.tunnel(name, rank, node))

    def end(self, run: Run, grace_s: float) -> None:
        self._room(run).end_all(_entries(run), grace_s)

    # ---- what it keeps -----------------------------------------------------------------------------------------------

    def _room(self, run: Run) -> _Room:
        with self._lock:
            key = f"{run.path} {run.record().id}"
            if key not in self._rooms:
                self._rooms[key] = _Room(run)
            return self._rooms[key]

    def _program(self, block: Block) -> Ssh:
        """Connections of this process, that end with it: there may be no run yet."""
        with self._lock:
            if block.config not in self._before_run:
                ssh = self._before_run[block.config] = Ssh(block.config, secrets.token_hex(6))
                atexit.register(ssh.close, block.hosts)
            return self._before_run[block.config]

    def _bring(self, deployment: Deployment, hosts: Sequence[str]) -> dict[str, Contact]:
        """Penstock on these hosts.  Raises the error of the first that cannot have it."""
        block = _block(deployment)
        new = [host for host in hosts if (block, host) not in self._contacts]
        ssh = self._program(block)
        bringer = Bringer(ssh, block, penstock_paths.home() / "cache" / "wheels")
        found = at_once(new, lambda host: bringer.bring(host, look(ssh, host, block)))
        for host, told in found.items():
            if isinstance(told, PenstockError):
                raise told
            self._contacts[block, host] = told
        return {host: self._contacts[block, host] for host in hosts}

    def _forget(self, hosts: Sequence[str]) -> None:
        """A host that failed may have lost its disk: it is looked at anew."""
        for key in [key for key in self._contacts if key[1] in hosts]:
            del self._contacts[key]


class _Told(msgspec.Struct):
    machine: Machine


def _block(deployment: Deployment) -> Block:
    return deployment.ssh or Block()


def _problems(deployment: Deployment, block: Block) -> list[Problem]:
    """What is wrong with the file, before any host is asked."""
    found = []
    if not block.hosts:
        found.append(Problem("ssh.hosts", "no host", 'name them: ssh: {hosts: ["user@host", ...]}'))
    for number, host in enumerate(block.hosts):
        where = f"ssh.hosts[{number}]"
        if not is_legal(host):
            found.append(Problem(where, f'"{host[:100]}" is no host', "user@host, or a name of ~/.ssh/config"))
        elif host in block.hosts[:number]:
            found.append(Problem(where, f'"{host}" is there twice', "name each host once"))
    if block.hosts and deployment.hardware.nodes > len(block.hosts):
        problem = f"{deployment.hardware.nodes} nodes a replica, but ssh.hosts has {len(block.hosts)}"
        found.append(Problem("hardware.nodes", problem, "name more hosts, or set fewer nodes"))
    if block.config is not None:
        path = Path(block.config).expanduser()
        if not path.is_absolute():
            found.append(Problem("ssh.config", f'"{block.config}" is not an absolute path', f'"{path.resolve()}"'))
        elif not path.is_file():
            found.append(Problem("ssh.config", f'no file "{path}"', "remove it to use ~/.ssh/config"))
    if not block.python or block.python.startswith("-"):
        found.append(Problem("ssh.python", f'"{block.python}" is no program', "the path of a Python on the hosts"))
    if not block.folder.startswith(("/", "~/")) or "\n" in block.folder:
        found.append(Problem("ssh.folder", f'"{block.folder}" is not an absolute path', "/a/folder, or ~/a/folder"))
    return found


def _paths_of(deployment: Deployment) -> tuple[str, ...]:
    """The model's folder, when it must be on every host at the path that it has here."""
    if deployment.model == DEMO_MODEL:
        return ()
    path = Path(deployment.model).expanduser()
    return (str(path.resolve()),) if path.exists() else ()


def finish(left: Left) -> None:
    """End on a host what an earlier `end` could not reach."""
    place, run_id = msgspec.convert(left.facts["place"], _Place), str(left.facts["run_id"])
    ssh = Ssh(left.facts["config"], secrets.token_hex(6))
    try:
        _end_there(ssh, place, End(place.folder, run_id, (), 0.0))
        ssh.check_run(place.host, ["rm", "-rf", place.folder])
    finally:
        ssh.close([place.host])
    run_folder.forget_left(run_id, place.host)


def _entries(run: Run) -> dict[str, tuple[Node, ...]]:
    return {name: _nodes(entry) for name, entry in run.handle().replicas.items()}


def _nodes(entry: Mapping[str, object]) -> tuple[Node, ...]:
    return msgspec.convert(entry["nodes"], tuple[Node, ...])


def _pids_by_host(entries: Mapping[str, Sequence[Node]]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for nodes in entries.values():
        for node in nodes:
            found.setdefault(node.host, set()).add(node.process.pid)
    return found


def _lives(node: Node, looks: Mapping[str, Look]) -> bool:
    return node.host in looks and looks[node.host].has(node.process, node.boot)


def _log_name(replica: str, rank: int) -> str:
    return f"logs/replica-{replica}-{rank}.log"


def _tell(ssh: Ssh, host: str, python: str, verb: str, given: bytes, timeout_s: float) -> bytes:
    """What `penstock.targets.ssh.agent` answers on a host.  Raises HostError."""
    done = ssh.run(host, [python, "-m", "penstock.targets.ssh.agent", verb], given, timeout_s)
    line = next((line for line in reversed(done.text.splitlines()) if line.startswith("{")), None)
    if done.code or line is None:
        raise failed(host, f"could not {verb} a node", done)
    if line.startswith('{"problem"'):
        raise failed(host, f"could not {verb} a node", done._replace(err=msgspec.json.decode(line)["problem"]))
    return line.encode()


def _end_there(ssh: Ssh, place: _Place, order: End) -> None:
    """End on one host what an order says.  Raises PenstockError when something is left."""
    # A host that lost its disk has nothing of ours to end it with, and nothing to end. (The run's own folder says
    # nothing: where hosts share it, another has removed it.)
    if ssh.run(place.host, ["test", "-x", place.python]).code:
        return
    told = _tell(ssh, place.host, place.python, "end", msgspec.json.encode(order), order.grace_s + _END_MARGIN_S)
    left = msgspec.json.decode(told, type=Ended).left
    if left:
        raise PenstockError(f"{', '.join(left)} is left on {short_name(place.host)}")


def _how_gone(node: Node, seen: Look) -> str:
    name = short_name(node.host)
    if seen.boot != node.boot:
        return f"{name} was restarted"
    return f"its node process {node.process.pid} on {name} is gone"


def _by_host(places: Sequence[_Place], nodes: Iterable[Node]) -> dict[str, tuple[_Place, list[Process]]]:
    found: dict[str, tuple[_Place, list[Process]]] = {place.host: (place, []) for place in places}
    for node in nodes:
        _, there = found.setdefault(node.host, (_Place(node.host, node.python, node.folder), []))
        there.append(node.process)
    return found


def _filled(text: str, words: Mapping[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(word, value)
    return text
