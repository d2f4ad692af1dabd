"""A simulated machine: a virtual clock, processes, threads and signals, in an order that a seed decides.

Theory of operation. Code under simulation is the real one and blocks as it does in production; each of its threads is a
greenlet. Whatever blocks, or acts beyond its process, parks the greenlet in the scheduler's heap with the time at which
it goes on. The scheduler takes the earliest entry; a random number breaks ties and is added to every wait, so the seed
decides who goes first. Nothing runs in parallel, and no real clock is read: the same seed gives the same steps.

A process that is killed is never resumed, so its code stops at its last switch point. Its greenlets are thrown away at
the end of the simulation; what their `finally` clauses then try to do raises `Killed`.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM, Signals

import greenlet

from penstock.processes import MARK_RANK, MARK_REPLICA, MARK_ROLE, MARK_RUN, MARK_RUN_ID, Marked
from penstock.wire.announcement import Process

EPOCH_S = 1_800_000_000.0
_JITTER_S = 0.004
_STALL_SHARE, _STALL_S = 0.01, 0.8  # a step that a busy machine holds up


class Killed(BaseException):
    """Raised in code of a process that does not live any more."""


class Task:
    """A thread of a simulated process."""

    def __init__(self, owner: SimProcess, work: Callable[[], None], name: str) -> None:
        self.owner, self.name = owner, name
        self.greenlet = greenlet.greenlet(self._run, owner.machine.hub)
        self.ticket = 0  # only the newest entry of the heap resumes it
        self.is_over = False
        self.was_notified = False
        self.joiners: list[Task] = []
        self._work = work

    def _run(self) -> None:
        try:
            self._work()
        except (Killed, greenlet.GreenletExit):
            return
        finally:
            self.is_over = True
        for joiner in self.joiners:
            self.owner.machine.notify(joiner)

    def is_alive(self) -> bool:
        return not self.is_over

    def join(self, timeout: float | None = None) -> None:
        machine = self.owner.machine
        ends_at = None if timeout is None else machine.time_s + timeout
        while not self.is_over and (ends_at is None or machine.time_s < ends_at):
            self.joiners.append(machine.current_task())
            machine.park(ends_at)


class SimProcess:
    """A process: its threads, its marks, how it takes signals. `exit_code` is None while it lives."""

    def __init__(
        self, machine: Machine, pid: int, role: str, marks: Mapping[str, str], parent: SimProcess | None
    ) -> None:
        self.machine, self.pid, self.role, self.marks, self.parent = machine, pid, role, dict(marks), parent
        self.started_at = round(machine.time_s, 2)
        self.exit_code: int | None = None
        self.ended_s = 0.0
        self.tasks: list[Task] = []
        self.on_term: Callable[[], None] | None = None  # what SIGTERM does; None: it ends
        self.on_end: list[Callable[[], None]] = []
        self.world = SimWorld(self)

    @property
    def is_alive(self) -> bool:
        return self.exit_code is None

    @property
    def identity(self) -> Process:
        return Process(self.pid, self.started_at, self.role)

    def end(self, code: int) -> None:
        if self.exit_code is None:
            self.exit_code, self.ended_s = code, self.machine.time_s
            self.machine.note(f"process {self.role} {self.pid} ended: {code}")
            for call in self.on_end:
                call()

    def __repr__(self) -> str:
        return f"{self.role} {self.pid}"


def rank_of(process: SimProcess) -> int:
    """Of a node of a replica, or of its engine's part there."""
    return int(process.marks.get(MARK_RANK, "0"))


class Machine:
    """The scheduler and the table of processes. `starters`: what the first words of a command line start."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.random = random.Random(seed)
        self.time_s = 100.0
        self.processes: dict[int, SimProcess] = {}
        self.starters: list[tuple[str, Callable[[SimProcess, Sequence[str]], None]]] = []
        self.is_calm = False  # no more faults of the machine
        self.error: BaseException | None = None
        # When, a draw that breaks ties, the entry's number; then a call, or the task to resume by its ticket.
        self._heap: list[tuple[float, float, int, Callable[[], None] | None, Task | None, int]] = []
        self._n_entries = 0
        self._n_pids = 1000
        self.hub = greenlet.getcurrent()
        self._task: Task | None = None
        self._trace = trace
        self.init = self.process("init", {}, None)

    def note(self, text: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.time_s:9.3f} {text}")

    # ---- time --------------------------------------------------------------------------------------------------------

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        self._push(time_s, call, None, 0)

    def _push(self, time_s: float, call: Callable[[], None] | None, task: Task | None, ticket: int) -> None:
        self._n_entries += 1
        at_s = time_s if time_s > self.time_s else self.time_s
        heapq.heappush(self._heap, (at_s, self.random.random(), self._n_entries, call, task, ticket))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.at(self.time_s + seconds + self.jitter(), call)

    def jitter(self) -> float:
        draw = self.random.random()
        if not self.is_calm and draw < _STALL_SHARE:
            return _STALL_S * self.random.random()
        return _JITTER_S * draw

    def run(self, until_s: float, check: Callable[[], None]) -> None:
        """Step until that time; `check` is called after every step."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.time_s, _, _, call, task, ticket = heapq.heappop(heap)
            if call is not None:
                call()
            elif task is None or task.ticket != ticket or task.is_over or not task.owner.is_alive:
                continue
            else:
                self._resume(task)
            if self.error is not None:
                raise self.error
            check()
        self.time_s = until_s

    # ---- threads -----------------------------------------------------------------------------------------------------

    def current_task(self) -> Task:
        assert self._task is not None, "only code of a simulated process may block"
        return self._task

    @property
    def current(self) -> SimProcess:
        return self._task.owner if self._task is not None else self.init

    def task(self, owner: SimProcess, work: Callable[[], None], name: str) -> Task:
        task = Task(owner, work, name)
        owner.tasks.append(task)
        self._resume_after(0.0, task)
        return task

    def _resume_after(self, seconds: float, task: Task) -> None:
        self._resume_at(self.time_s + seconds + self.jitter(), task)

    def _resume_at(self, time_s: float, task: Task) -> None:
        task.ticket += 1
        self._push(time_s, None, task, task.ticket)

    def _resume(self, task: Task) -> None:
        before, self._task = self._task, task
        try:
            task.greenlet.switch()
        except Exception as exc:  # noqa: BLE001 - the simulation ends with it
            self.error = exc
        finally:
            self._task = before

    def park(self, wakes_at: float | None) -> bool:
        """Give way until that time, or until `notify`; whether it was notified."""
        task = self.current_task()
        task.was_notified = False
        task.ticket += 1
        if wakes_at is not None:
            self._resume_at(wakes_at + self.jitter(), task)
        self.hub.switch()
        if not task.owner.is_alive:
            raise Killed
        return task.was_notified

    def notify(self, task: Task) -> None:
        task.was_notified = True
        self._resume_after(0.0, task)

    def step(self, seconds: float = 0.0) -> None:
        """A switch point: others may run, and this process may be killed here."""
        if self._task is not None:
            self.park(self.time_s + seconds)

    # ---- processes ---------------------------------------------------------------------------------------------------

    def process(self, role: str, marks: Mapping[str, str], parent: SimProcess | None) -> SimProcess:
        self._n_pids += 1
        process = SimProcess(self, self._n_pids, role, marks, parent)
        self.processes[process.pid] = process
        self.note(f"process {role} {process.pid} {process.marks.get(MARK_REPLICA, '')} started")
        return process

    def program(self, process: SimProcess, main: Callable[[], int]) -> None:
        """Run `main` as a process's main thread; the process ends with its exit code."""

        def work() -> None:
            process.end(main())

        self.task(process, work, "main")

    def living(self, role: str | None = None, replica: str | None = None) -> Iterator[SimProcess]:
        for process in list(self.processes.values()):
            is_meant = role in (None, process.role) and replica in (None, process.marks.get(MARK_REPLICA))
            if process.is_alive and is_meant and process is not self.init:
                yield process

    def kill(self, process: SimProcess) -> None:
        process.end(-9)

    def discard(self) -> None:
        """Throw all code away that has not ended."""
        for process in self.processes.values():
            process.exit_code = -9 if process.exit_code is None else process.exit_code
            for task in process.tasks:
                while not task.greenlet.dead and task.greenlet:
                    try:
                        task.greenlet.throw(greenlet.GreenletExit)
                    except BaseException:  # noqa: BLE001, S110 - of code that is being thrown away
                        pass


class SimWorld:
    """The `World` of one process."""

    def __init__(self, process: SimProcess) -> None:
        self._process, self._machine = process, process.machine
        self.random = random.Random(self._machine.random.random())
        self.processes = SimProcesses(self._machine)

    def now(self) -> float:
        return self._machine.time_s

    def unix(self) -> float:
        return EPOCH_S + self._machine.time_s

    def sleep(self, seconds: float) -> None:
        self._alive().park(self._machine.time_s + seconds)

    async def pause(self, seconds: float) -> None:
        import asyncio

        await asyncio.sleep(seconds)

    def event(self) -> SimEvent:
        return SimEvent(self._machine)

    def condition(self) -> SimCondition:
        return SimCondition(self._machine)

    def thread(self, work: Callable[[], None], name: str) -> Task:
        return self._alive().task(self._process, work, name)

    def _alive(self) -> Machine:
        if not self._process.is_alive:
            raise Killed
        return self._machine


class SimEvent:
    """`threading.Event`."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._is_set, self._waiting = machine, False, list[Task]()

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._machine.notify(task)

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        ends_at = None if timeout is None else self._machine.time_s + timeout
        while not self._is_set and (ends_at is None or self._machine.time_s < ends_at):
            self._waiting.append(self._machine.current_task())
            self._machine.park(ends_at)
        return self._is_set


class SimCondition:
    """`threading.Condition`; its lock needs nothing, since code only gives way where it waits."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._waiting = machine, list[Task]()

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *error: object) -> None:
        pass

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        ends_at = None if timeout is None else self._machine.time_s + timeout
        while not predicate() and (ends_at is None or self._machine.time_s < ends_at):
            self._waiting.append(self._machine.current_task())
            self._machine.park(ends_at)
        return predicate()

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._machine.notify(task)


class SimProcesses:
    """The module `penstock.processes`, for the process that runs now."""

    MARK_REPLICA, MARK_RUN = MARK_REPLICA, MARK_RUN

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def _find(self, process: Process) -> SimProcess | None:
        own = self._machine.processes.get(process.pid)
        return own if own is not None and own.is_alive and own.started_at == process.started_at else None

    def identify(self, pid: int, role: str = "") -> Process:
        own = self._machine.current  # the only pid that code under simulation knows is its process's
        return Process(own.pid, own.started_at, role)

    def marks(self, run: str, run_id: str, role: str) -> dict[str, str]:
        return {MARK_RUN: run, MARK_RUN_ID: run_id, MARK_ROLE: role}

    def environment(self, process: Process) -> dict[str, str]:
        own = self._find(process)
        return dict(own.marks) if own is not None else {}

    def start_detached(
        self,
        argv: Sequence[str],
        marks: Mapping[str, str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        files: Sequence[int] = (),
    ) -> Process:
        self._machine.step()
        process = self._machine.process(marks.get(MARK_ROLE, ""), marks, self._machine.current)
        line = " ".join(argv)
        start = next(start for words, start in self._machine.starters if words in line)
        start(process, argv)
        self._machine.step()  # it runs, and nobody has noted it yet
        return process.identity

    def is_alive(self, process: Process) -> bool:
        return self._find(process) is not None

    def find_marked(self, run: str | None = None, replica: str | None = None, rank: str | None = None) -> list[Marked]:
        self._machine.step()
        marked = [p for p in self._machine.living(replica=replica) if p is not self._machine.current and p.marks]
        marked = [p for p in marked if rank in (None, p.marks.get(MARK_RANK))]
        return [
            Marked(p.pid, p.started_at, p.role, p.marks[MARK_RUN], p.marks.get(MARK_RUN_ID, ""), p.marks[MARK_REPLICA])
            if MARK_REPLICA in p.marks
            else Marked(p.pid, p.started_at, p.role, p.marks[MARK_RUN], p.marks.get(MARK_RUN_ID, ""))
            for p in marked
        ]

    def signal_process(self, process: Process, number: Signals) -> None:
        own = self._find(process)
        if own is None:
            return
        if number in (SIGTERM, SIGINT) and own.on_term is not None:
            own.on_term()
        elif number in (SIGTERM, SIGINT, SIGKILL):
            own.end(-int(number))

    def wait_gone(self, processes: Iterable[Process], timeout_s: float) -> list[Process]:
        ends_at = self._machine.time_s + timeout_s
        left = [process for process in processes if self.is_alive(process)]
        while left and self._machine.time_s < ends_at:
            self._machine.step(0.05)
            left = [process for process in left if self.is_alive(process)]
        return left

    def end(self, processes: Sequence[Process], grace_s: float) -> list[Process]:
        for process in processes:
            self.signal_process(process, SIGTERM)
        left = self.wait_gone(processes, grace_s)
        for process in left:
            self.signal_process(process, SIGKILL)
        return self.wait_gone(left, 5.0)

    def sweep(
        self, run: str, replica: str | None = None, rank: str | None = None, keep: Iterable[int] = ()
    ) -> list[Marked]:
        swept: list[Marked] = []
        while living := [process for process in self.find_marked(run, replica, rank) if process.pid not in set(keep)]:
            swept += living
            for process in living:
                self.signal_process(process, SIGKILL)
        return swept

    def shared_memory(self, processes: Iterable[Process]) -> list[str]:
        return []

    def unlink_shared_memory(self, segments: Iterable[str]) -> None:
        pass


def quiet_greenlets() -> None:
    """Keep greenlets that are thrown away from writing to standard error."""
    sys.unraisablehook = lambda _: None
