"""Engines: what runs a model. One package each; this module has the seam and the table. `node` starts them."""

from __future__ import annotations

import importlib
import re
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from penstock.errors import Problem
from penstock.models.read_rate import Reading, Way
from penstock.planner import Plan
from penstock.spec.deployment import Scalar
from penstock.wire.announcement import Progress
from penstock.wire.metric_names import Kind

# name -> "module:Class". "fake" is for tests: it speaks vLLM's HTTP and answers without a model.
TABLE = {
    "vllm": "penstock.engines.vllm.engine:Vllm",
    "llamacpp": "penstock.engines.llamacpp.engine:LlamaCpp",
    "fake": "penstock.engines.fake:Fake",
}
# In the environment of an engine: every call must bring this key as a bearer token, also on loopback.
KEY_VARIABLE = "PENSTOCK_ENGINE_KEY"


class Missing(msgspec.Struct, frozen=True):
    """Why an engine cannot run here, and the line that installs it."""

    reason: str
    install: str


class Among(msgspec.Struct, frozen=True):
    """This node among those of a replica that is cut over several: `master_*` are the first node's."""

    rank: int
    n_nodes: int
    master_address: str
    master_port: int


class Place(msgspec.Struct, frozen=True):
    """What only the node knows: where to listen, a private folder (short path, removed afterwards), the Python.
    `key`: every call must bring it; None where nothing calls. `env`: what the network between nodes needs.
    `cache`: a folder for what it compiles, kept for its next start."""

    host: str
    port: int
    folder: str
    python: str
    key: str | None = None
    among: Among | None = None
    env: dict[str, str] = {}
    cache: str | None = None


class Command(msgspec.Struct, frozen=True):
    """A process to start. `env` is added to the node's own; `files` (relative to the private folder) come first.
    `defaults`: variables that the node's own environment may set otherwise. `links`: symbolic links to make where they
    are absent, with the folders that they lead to."""

    argv: tuple[str, ...]
    env: dict[str, str] = {}
    files: dict[str, str] = {}
    defaults: dict[str, str] = {}
    links: dict[str, str] = {}


class Seen(msgspec.Struct, frozen=True):
    """What the log has reported so far. `measured`: the engine's numbers, in the units of their names."""

    progress: Progress
    measured: dict[str, float] = {}


class Diagnosis(msgspec.Struct, frozen=True):
    """Why an engine ended. `is_final`: the same start would fail the same way. `line`: of its log."""

    reason: str
    hint: str | None = None
    is_final: bool = False
    line: str | None = None


class Disk(msgspec.Struct, frozen=True):
    """What a node knows of the model's files before a start: bytes of all, how they read, the memory that is free."""

    n_bytes: int
    reading: Reading
    free_bytes: int


class LoadChoice(msgspec.Struct, frozen=True):
    """How an engine shall load: flags as `engine.args` has them, and why, as the end of a sentence. `way`: how it then
    reads."""

    why: str
    args: dict[str, Scalar | list[Scalar]] = {}
    way: Way = "mapped"


class Call(NamedTuple):
    """A POST to the engine's own address; `body` is sent as JSON."""

    path: str
    body: Mapping[str, str] | None = None


class Death(NamedTuple):
    """A line of an engine's log that explains its end; {0}, {1} in `reason` and `hint` are its groups."""

    pattern: re.Pattern[str]
    reason: str
    hint: str | None = None
    is_final: bool = True


class Metrics(msgspec.Struct, frozen=True):
    """Names of series in the engine's /metrics. `iterations` are counters that move whenever work is done."""

    running: str
    waiting: str
    iterations: tuple[str, ...]
    kv_use: str | None = None  # 0 to 1, one series per data-parallel rank
    # Counters of tokens; those of `prompt_tokens` add up to all prompt tokens, with the cached ones.
    prompt_tokens: tuple[str, ...] = ()
    output_tokens: str | None = None
    cached_tokens: str | None = None


class Family(NamedTuple):
    """A family of the engine's /metrics. `since`: the first version with it, None for those before 0.30."""

    kind: Kind
    about: str
    labels: tuple[str, ...] = ()
    since: str | None = None


class Engine(ABC):
    """The seam. Everything but `missing`, `version`, `can_choose_load` and `choose_load` is pure."""

    name: str
    package: str | None = None  # what is installed where it can run, by its import name
    forms: tuple[str, ...]  # the forms of weights it loads, best first
    metrics: Metrics
    prefix: str = ""  # how the names of its families begin
    families: Mapping[str, Family] = {}  # by the name on its page
    renamed: Mapping[str, str] = {}  # names of older versions -> the present ones
    vital_roles: tuple[str, ...] = ()  # how the titles of forked processes begin that it cannot live without
    cache_variable: str | None = None  # set by a user who keeps what the engine compiles elsewhere
    can_cross_nodes: bool = False  # whether one replica may take several machines

    @abstractmethod
    def missing(self) -> Missing | None:
        """None when it can start here; never imports the engine."""

    @abstractmethod
    def version(self) -> str:
        """The installed version, from package metadata, without importing it."""

    def loads(self, form: str, args: dict[str, Scalar | list[Scalar]]) -> bool:
        """Whether it can serve weights of this form ("none": the folder holds no weights)."""
        return form in self.forms

    @abstractmethod
    def problems(self, args: dict[str, Scalar | list[Scalar]], version: str | None = None) -> list[Problem]:
        """What is wrong with pass-through arguments in that version, or the one that is installed here."""

    def warnings(self, plan: Plan) -> tuple[str, ...]:
        """What this engine, as it is installed here, cannot do for a plan that it will serve."""
        return ()

    def can_choose_load(self, plan: Plan) -> bool:
        """Whether it has several ways to load this plan's files, and the deployment file leaves the choice open."""
        return False

    def choose_load(self, plan: Plan, disk: Disk) -> LoadChoice:
        """How to load from that disk; only where `can_choose_load`."""
        return LoadChoice("the engine's own way")

    def input_modalities(self, plan: Plan) -> tuple[str, ...]:
        """What its requests may hold: ("text",) or ("text", "image"); empty where it is not known."""
        return ("text",)

    def trial(self, plan: Plan) -> tuple[str, ...]:
        """Words for Python that ask it without a GPU whether it takes these settings: exit code 2 says no."""
        return ()

    def why_sleepless(self, plan: Plan) -> str | None:
        """Why it cannot sleep with this plan, as a sentence without its end; None where it can."""
        return f"engine {self.name} cannot give its memory back and take it again"

    def sleep_levels(self, plan: Plan) -> tuple[int, ...]:
        """1: the weights go to the machine's memory; 2: they are dropped, and read again to wake."""
        return (1, 2)

    def sleep_calls(self, level: int) -> tuple[Call, ...]:
        """What puts it to sleep, in this order; only where nothing keeps it from sleeping. Requests that come
        meanwhile wait in it."""
        return ()

    def wake_calls(self, level: int) -> tuple[Call, ...]:
        """What wakes it from that level."""
        return ()

    @abstractmethod
    def command(self, plan: Plan, place: Place) -> Command:
        """The process that serves `plan` at `place`."""

    @abstractmethod
    def read(self, line: str, seen: Seen, plan: Plan) -> Seen:
        """`seen` after one more line of log; the same object when the line is not known."""

    @abstractmethod
    def diagnose(self, exit_code: int, tail: Sequence[str]) -> Diagnosis:
        """Why it ended, from its exit code (negative: signal) and last lines."""


def load(name: str) -> Engine:
    """The engine of that name; `name` is a key of TABLE."""
    module, _, attribute = TABLE[name].partition(":")
    engine = getattr(importlib.import_module(module), attribute)()
    assert isinstance(engine, Engine)
    return engine


def explain(ended: str, deaths: Sequence[Death], lines: Sequence[str]) -> Diagnosis:
    """The diagnosis of the first death in the table that a line matches. `ended`: "vLLM exited with code 1"."""
    for death in deaths:
        for line in lines:
            if match := death.pattern.search(line):
                groups = [(group or "").strip() for group in match.groups()]
                hint = death.hint.format(*groups) if death.hint else None
                return Diagnosis(f"{ended}: {death.reason.format(*groups)}", hint, death.is_final, line)
    return Diagnosis(ended)


def telling_lines(tail: Sequence[str], cause: str | None, count: int) -> list[str]:
    """The last `count` lines, with the lines that lead to a cause further up: vLLM's parent process prints a long
    traceback after that of the process that failed."""
    lines = list(tail)
    if cause is None or cause in lines[-count:] or cause not in lines:
        return lines[-count:]
    at = len(lines) - 1 - lines[::-1].index(cause)
    before = count * 2 // 3
    return [*lines[max(0, at + 1 - before) : at + 1], "...", *lines[-(count - before - 1) :]]


def how_it_ended(exit_code: int) -> str:
    """An exit code in words: -9 -> "was killed by signal 9 (SIGKILL: ...)", 2 -> "exited with code 2"."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    name = {int(number): number.name for number in signal.Signals}.get(-exit_code, "no name")
    why = ": out of memory, or ended by another process" if -exit_code == signal.SIGKILL else ""
    return f"was killed by signal {-exit_code} ({name}{why})"
