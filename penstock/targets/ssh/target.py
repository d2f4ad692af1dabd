"""Target "ssh": replicas are processes on hosts that are reached by OpenSSH alone, and need nothing but Python.

An engine listens on loopback of its host. A tunnel for each node joins it with this machine: the node announces its
replica through it, and the gateway calls the engine through it. So nothing listens beyond loopback, and the hosts need
no way to each other.
"""

from __future__ import annotations

import atexit
import secrets
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from penstock import paths, run_folder
from penstock.errors import PenstockError, Problem
from penstock.hardware import Machine, visible
from penstock.hardware.detect import machine_in
from penstock.run_folder import Artifact, Handle, Launch, Left, Run, Unit, replica
from penstock.spec.blocks import Ssh as Block
from penstock.spec.deployment import DEMO_MODEL, Deployment
from penstock.targets import Placement, Surveyed, Target
from penstock.targets.assumed import machines_of_file
from penstock.targets.openssh import Ssh, at_once, is_legal, short_name
from penstock.targets.ssh import logs as streams
from penstock.targets.ssh.agent import End
from penstock.targets.ssh.install import HostInstaller, PreparedHost, look
from penstock.targets.ssh.placement import Node, RunHosts, RunPlace, assign, end_there, log_name
from penstock.text import MIB, show_bytes

_MIN_FREE_BYTES = 128 * MIB  # penstock there takes 16 MiB, a run its logs


class OverSsh(Target):
    name = "ssh"
    capabilities = frozenset({"survey"})
    has_own_caches = True

    def __init__(self) -> None:
        self._runs: dict[str, RunHosts] = {}
        self._before_run: dict[str | None, Ssh] = {}
        self._prepared: dict[tuple[Block, str], PreparedHost] = {}
        self._lock = threading.Lock()

    # ---- before a run ------------------------------------------------------------------------------------------------

    def check(self, deployment: Deployment, is_rehearsal: bool = False) -> list[Problem]:
        block = _block(deployment)
        problems = _problems(deployment, block)
        if problems:
            return problems
        ssh, model = self._program(block), _model_folders(deployment)
        answers = at_once(block.hosts, lambda host: look(ssh, host, block, model))
        absent: list[str] = []
        for number, host in enumerate(block.hosts):
            facts = answers[host]
            if isinstance(facts, PenstockError):
                if not (is_rehearsal and facts.is_retryable):
                    problems.append(Problem(f"ssh.hosts[{number}]", facts.message, facts.hint))
                continue
            if facts.free_bytes < _MIN_FREE_BYTES:
                message = f"{short_name(host)} has {show_bytes(facts.free_bytes)} free in {facts.folder}"
                hint = f"free {show_bytes(_MIN_FREE_BYTES)} for penstock and its logs, or name a folder on another disk"
                problems.append(Problem("ssh.folder", message, hint))
            if facts.absent:
                absent.append(host)
        # Staged, one host with the model is enough: the others get it from there.
        if absent and (deployment.cache.stage == "none" or len(absent) == len(block.hosts)):
            hint = "put it on a file system that all hosts have at this path, set cache.stage, or use a hub id"
            problems += [Problem("model", f'{model[0]} is not on "{short_name(host)}"', hint) for host in absent]
        return problems

    def machines(self, deployment: Deployment, is_rehearsal: bool = False) -> list[Machine]:
        try:
            return self._machines(deployment)
        except PenstockError as exc:
            if not (is_rehearsal and exc.is_retryable):
                raise
            return machines_of_file(deployment, exc.message, list(map(short_name, _block(deployment).hosts)))

    def _machines(self, deployment: Deployment) -> list[Machine]:
        answers = self.survey(deployment, ["-m", "penstock.hardware.detect"], timeout_s=60.0)
        for answer in answers:
            if answer.exit_code != 0:
                raise PenstockError(
                    f"could not survey {answer.host}: {(answer.err.strip().splitlines() or ['no answer'])[-1]}",
                    hint="Does `ssh HOST` work by hand?",
                    is_retryable=True,
                )
        return [machine_in(answer.out) for answer in answers]

    def survey(self, deployment: Deployment, argv: Sequence[str], timeout_s: float) -> list[Surveyed]:
        block = _block(deployment)
        ssh, prepared = self._program(block), self._bring(block, block.hosts)
        variables = visible(deployment.hardware.gpu_ids or ())
        limits = ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []

        def ask(host: str) -> Surveyed:
            rank = str(block.hosts.index(host))
            words = [*limits, prepared[host].python, *(word.replace("{rank}", rank) for word in argv)]
            done = ssh.run(host, words, timeout_s=timeout_s)
            return Surveyed(short_name(host), done.code, done.text, done.err)

        return [
            Surveyed(short_name(host), None, err=answer.message) if isinstance(answer, PenstockError) else answer
            for host, answer in at_once(block.hosts, ask).items()
        ]

    def nodes_per_machine(self, deployment: Deployment, handle: Handle, n_more: int = 0) -> list[int]:
        hosts = _block(deployment).hosts
        placed = {name: [node.host for node in _nodes(entry)] for name, entry in handle.replicas.items()}
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
        hosts, entries = self._hosts(run), _entries(run)
        looks = hosts.watch.see(_pids_by_host(entries))
        return {replica(name): hosts.placement(name, nodes, looks) for name, nodes in entries.items()}

    def logs(self, run: Run, unit: Unit, follow: bool, last: int | None = None) -> Iterator[str]:
        kept, nodes = f"replica-{unit.name}", _entries(run).get(unit.name)
        if nodes is None or run.log(kept).exists():  # it has ended, and its log was fetched
            return run.log_lines(kept, follow, last)
        sources = [
            streams.Source(node.host, node.python, f"{node.folder}/{log_name(unit.name, rank)}")
            for rank, node in enumerate(nodes)
        ]
        return streams.lines(self._hosts(run).ssh, sources, follow, last)

    def place(self, run: Run, units: Collection[Unit]) -> Handle:
        hosts, entries = self._hosts(run), _entries(run)
        before, wanted = dict(entries), sorted(unit.name for unit in units)
        problems, unnoted = list[PenstockError](), set(run.handle().ordered) - set(wanted)
        for name in sorted(unnoted):
            try:
                hosts.end_unnoted(name)
                unnoted.remove(name)
            except PenstockError as exc:
                problems.append(exc)
        for name in [name for name in entries if name not in wanted]:
            try:
                hosts.end_replica(name, entries[name])
                del entries[name]
            except PenstockError as exc:  # it holds its GPUs until its host is back: it stays known, and is tried again
                problems.append(exc)
        looks = hosts.watch.see_now(_pids_by_host(entries))
        placed = {name: [node.host for node in nodes] for name, nodes in entries.items()}
        names = [*wanted, *(set(entries) - set(wanted))]
        assigned = assign(hosts.block.hosts, run.deployment().hardware.nodes, names, placed)
        for name in wanted:
            nodes = entries.get(name)
            if nodes is not None and all(node.lives(looks) for node in nodes):
                hosts.keep(name)
                continue
            try:
                prepared = self._bring(hosts.block, assigned[name])
                entries[name] = hosts.place(name, [prepared[host] for host in assigned[name]], nodes, looks)
            except PenstockError as exc:
                # What is known to be gone may come back another time; the others do not wait for it.
                self._forget(assigned[name])
                problems.append(exc)
        if problems and entries == before:
            raise problems[0]
        noted = {replica(name).key: {"nodes": msgspec.to_builtins(nodes)} for name, nodes in entries.items()}
        return Handle(self.name, noted, tuple(sorted(unnoted)))

    def keep_up(self, run: Run) -> None:
        for name, nodes in _entries(run).items():
            self._hosts(run).keep_tunnels(name, nodes)

    def end(self, run: Run, grace_s: float) -> None:
        self._hosts(run).end_all(_entries(run), grace_s)

    # ---- what it keeps -----------------------------------------------------------------------------------------------

    def _hosts(self, run: Run) -> RunHosts:
        with self._lock:
            key = f"{run.path} {run.record().id}"
            if key not in self._runs:
                self._runs[key] = RunHosts(run)
            return self._runs[key]

    def _program(self, block: Block) -> Ssh:
        """Connections of this process, that end with it: there may be no run yet."""
        with self._lock:
            if block.config not in self._before_run:
                ssh = self._before_run[block.config] = Ssh(block.config, secrets.token_hex(6))
                atexit.register(ssh.close, block.hosts)
            return self._before_run[block.config]

    def _bring(self, block: Block, hosts: Sequence[str]) -> dict[str, PreparedHost]:
        """Penstock on these hosts.  Raises the error of the first that cannot have it."""
        ssh = self._program(block)
        installer = HostInstaller(ssh, block, paths.home() / "cache" / "wheels")
        new = [host for host in hosts if (block, host) not in self._prepared]
        for host, answer in at_once(new, lambda host: installer.bring(host, look(ssh, host, block))).items():
            if isinstance(answer, PenstockError):
                raise answer
            self._prepared[block, host] = answer
        return {host: self._prepared[block, host] for host in hosts}

    def _forget(self, hosts: Sequence[str]) -> None:
        """Look anew at hosts that failed: they may have lost their disks."""
        for key in [key for key in self._prepared if key[1] in hosts]:
            del self._prepared[key]


def _block(deployment: Deployment) -> Block:
    return deployment.ssh or Block()


def _problems(deployment: Deployment, block: Block) -> list[Problem]:
    """What is wrong with the file, before any host is asked."""
    problems = []
    if not block.hosts:
        problems.append(Problem("ssh.hosts", "no host", 'name them: ssh: {hosts: ["user@host", ...]}'))
    for number, host in enumerate(block.hosts):
        where = f"ssh.hosts[{number}]"
        if not is_legal(host):
            problems.append(Problem(where, f'"{host[:100]}" is no host', "user@host, or a name of ~/.ssh/config"))
        elif host in block.hosts[:number]:
            problems.append(Problem(where, f'"{host}" is there twice', "name each host once"))
    if block.hosts and deployment.hardware.nodes > len(block.hosts):
        message = f"{deployment.hardware.nodes} nodes a replica, but ssh.hosts has {len(block.hosts)}"
        problems.append(Problem("hardware.nodes", message, "name more hosts, or set fewer nodes"))
    if block.config is not None:
        path = Path(block.config).expanduser()
        if not path.is_absolute():
            problems.append(Problem("ssh.config", f'"{block.config}" is not an absolute path', f'"{path.resolve()}"'))
        elif not path.is_file():
            problems.append(Problem("ssh.config", f'no file "{path}"', "remove it to use ~/.ssh/config"))
    if not block.python or block.python.startswith("-"):
        problems.append(Problem("ssh.python", f'"{block.python}" is no program', "the path of a Python on the hosts"))
    if not block.folder.startswith(("/", "~/")) or "\n" in block.folder:
        problems.append(Problem("ssh.folder", f'"{block.folder}" is not an absolute path', "/a/folder, or ~/a/folder"))
    return problems


def _model_folders(deployment: Deployment) -> tuple[str, ...]:
    """The model's folder, which every host must have at one path; this machine need not have it."""
    path = Path(deployment.model).expanduser()
    if deployment.model != DEMO_MODEL and path.exists():
        return (str(path.resolve()),)
    return (deployment.model,) if deployment.model.startswith(("/", "~")) else ()


def finish(left: Left) -> None:
    """End on a host what an earlier `end` could not reach."""
    place, run_id = msgspec.convert(left.facts["place"], RunPlace), str(left.facts["run_id"])
    ssh = Ssh(left.facts["config"], secrets.token_hex(6))
    try:
        end_there(ssh, place, End(place.folder, run_id, (), 0.0))
        ssh.check_run(place.host, ["rm", "-rf", place.folder])
    finally:
        ssh.close([place.host])
    run_folder.forget_left(run_id, place.host)


def _entries(run: Run) -> dict[str, tuple[Node, ...]]:
    return {name: _nodes(entry) for name, entry in run.handle().replicas.items()}


def _nodes(entry: Mapping[str, object]) -> tuple[Node, ...]:
    return msgspec.convert(entry["nodes"], tuple[Node, ...])


def _pids_by_host(entries: Mapping[str, Sequence[Node]]) -> dict[str, set[int]]:
    pids: dict[str, set[int]] = {}
    for nodes in entries.values():
        for node in nodes:
            pids.setdefault(node.host, set()).add(node.process.pid)
    return pids
