"""What a measurement of a workbench means: a line of `doctor` for each answer, with its cure. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import Literal

import msgspec

from penstock.errors import Finding, State
from penstock.spec.deployment import Deployment
from penstock.targets.cloudera.names import block_of
from penstock.targets.cloudera.words import Life
from penstock.text import MIB, show_bytes, show_seconds

# The default of a project is 64 MB, with which NCCL and vLLM's message queues end with a bus error.
LEAST_SHARED_MEMORY_MB = 2048
_SLOW_BYTES_PER_S, _LONG_LOAD_S = 0.2e9, 600.0
_NAMES = {"application": "the application", "job-0": "the first {}", "job-1": "the second {}"}
_POLICY = "Ask an administrator to allow TCP between pods of the project (the network policy of their namespace)."
_BUFFER = "Ask an administrator to turn off buffering in the proxy (nginx: proxy_buffering off)."
_TIMEOUT = "Ask an administrator for a longer time limit of the proxy (nginx: proxy_read_timeout, proxy_send_timeout)."


class Note(msgspec.Struct, frozen=True):
    """What a pod wrote. `reached`: by the other pod and by port seconds to connect, or why not."""

    address: str
    ports: tuple[int, ...]
    shared_memory_bytes: int
    free_bytes: int
    local_free_bytes: int
    weights_bytes: int
    python: str
    reached: dict[str, dict[str, float | str]] = {}
    read_bytes_per_s: float | None = None


class Stream(msgspec.Struct, frozen=True):
    """An answer of the application through the workbench's proxy, from the machine of `doctor`."""

    status: int | None = None
    first_s: float | None = None
    whole_s: float = 0.0
    is_whole: bool = False
    error: str | None = None


class Grace(msgspec.Struct, frozen=True):
    """`seconds` that a process lived after a stop; None: longer than was waited."""

    seconds: float | None
    has_signal: bool


class Reading(msgspec.Struct, frozen=True):
    """`lives`: of each pod's workload, as the API has it. `talking`, `silent`: streams of `stream_s`, with an event
    each second, or only at both ends. `what`: a node was; `refusals`: why one was not launched."""

    notes: Mapping[str, Note]
    lives: Mapping[str, Life]
    talking: Stream | None
    silent: Stream | None
    stream_s: float
    grace: Grace | None
    what: Literal["job", "worker"] = "job"
    refusals: Mapping[str, str] = {}

    def name(self, part: str) -> str:
        return _NAMES[part].format(self.what)


def of_reading(reading: Reading, deployment: Deployment, download_bytes: int | None) -> list[Finding]:
    findings = [*_missing(reading), *_reach(reading, deployment)]
    notes = list(reading.notes.values())
    if notes:
        findings += [_shared_memory(notes, deployment), _disk(notes, download_bytes)]
    rates = [note.read_bytes_per_s for note in notes if note.read_bytes_per_s is not None]
    findings += [_read_rate(rates[0], download_bytes)] if rates else []
    if reading.talking is not None and reading.silent is not None:
        findings += _streams(reading.talking, reading.silent, reading.stream_s, block_of(deployment).public)
    return [*findings, *([_stop(reading.grace)] if reading.grace is not None else [])]


def of_public(message: str) -> Finding:
    cure = 'Site Administration > Security: "Allow applications to be configured with unauthenticated access"; or '
    cure += "remove cloudera.public, and let clients send the workbench's key."
    return Finding("public", "bad", f"the workbench refuses an application without a login: {message}", cure)


# ---- pods ------------------------------------------------------------------------------------------------------------


def _missing(reading: Reading) -> Iterator[Finding]:
    for part, life in reading.lives.items():
        if part in reading.refusals:
            cure = "`up` would wait for the same: cure that, or take cloudera.nodes: jobs."
            yield Finding("workers", "bad", f"{reading.name(part)} {reading.refusals[part]}", cure)
        elif part not in reading.notes:
            why = {"queued": "waits for a machine", "placed": "started, and wrote nothing", "gone": "ended at once"}
            cure = "Its log is in the workbench." if life != "queued" else "Try again when the workbench has room."
            yield Finding("pods", "warning", f"not measured: {reading.name(part)} {why[life]}", cure)


def _reach(reading: Reading, deployment: Deployment) -> Iterator[Finding]:
    """Engines listen on ports of their choice, so a port that is blocked is a start that fails now and then."""
    notes = reading.notes
    blocked: dict[str, list[str]] = {}
    times, ports = [], set[int]()
    for source, goal in permutations(sorted(notes), 2):
        for port, answer in notes[source].reached.get(goal, {}).items():
            ports.add(int(port))
            if isinstance(answer, str):
                blocked.setdefault(answer, []).append(f"{reading.name(source)} to {reading.name(goal)} on {port}")
            else:
                times.append(answer)
    if not ports:
        return
    shown = ", ".join(map(str, sorted(ports)))
    if not blocked:
        longest = show_seconds(max(times))
        yield Finding("network", "ok", f"pods reach each other on ports {shown}: connected within {longest}")
        return
    has_workers = block_of(deployment).nodes == "workers"
    pairs = [words for group in blocked.values() for words in group]
    between_nodes = all(_NAMES["application"] not in words for words in pairs)
    state: State = "warning" if between_nodes and deployment.hardware.nodes == 1 else "bad"
    more = {answer: f" and {len(words) - 3} more" * (len(words) > 3) for answer, words in blocked.items()}
    groups = [f"{answer}: {', '.join(words[:3])}{more[answer]}" for answer, words in blocked.items()]
    text = "no pod reaches another" if not times else "; ".join(groups)
    cure = _POLICY if has_workers or times else f"Set cloudera.nodes: workers, whose network is documented. {_POLICY}"
    yield Finding("network", state, f"{text} (ports {shown})", cure)


def _shared_memory(notes: Sequence[Note], deployment: Deployment) -> Finding:
    n_bytes, n_ranks = min(note.shared_memory_bytes for note in notes), deployment.hardware.gpus_per_node or 1
    wanted_mb = block_of(deployment).shared_memory_mb
    text = f"{show_bytes(n_bytes)} in a pod"
    if n_ranks == 1 or n_bytes >= LEAST_SHARED_MEMORY_MB * MIB:
        return Finding("/dev/shm", "ok", text)
    if wanted_mb is not None and wanted_mb >= LEAST_SHARED_MEMORY_MB:
        return Finding("/dev/shm", "ok", f"{text}; `up` raises the project's limit to {wanted_mb} MB")
    cure = f"Set cloudera.shared_memory_mb: {LEAST_SHARED_MEMORY_MB}; `up` then raises the project's limit."
    return Finding("/dev/shm", "bad", f"{text}, and {n_ranks} GPUs of a pod need {LEAST_SHARED_MEMORY_MB} MB", cure)


def _disk(notes: Sequence[Note], download_bytes: int | None) -> Finding:
    free, local, present = notes[0].free_bytes, notes[0].local_free_bytes, notes[0].weights_bytes
    text = f"{show_bytes(free)} free in the project, {show_bytes(local)} on a pod's own disk"
    if download_bytes is None:
        return Finding("disk", "ok", text)
    if present >= download_bytes:
        return Finding("disk", "ok", f"{text}; the weights ({show_bytes(present)}) are in the project")
    needed = download_bytes - present
    if free < needed:
        cure = "Remove files of the project, or ask an administrator for more space."
        return Finding("disk", "bad", f"{text}; the weights need {show_bytes(needed)} more", cure)
    return Finding("disk", "ok", f"{text}; the weights need {show_bytes(needed)}")


def _read_rate(bytes_per_s: float, download_bytes: int | None) -> Finding:
    text = f"{bytes_per_s / 1e9:.2g} GB/s of the project's files, by one reader"
    is_slow = bytes_per_s < _SLOW_BYTES_PER_S
    if download_bytes:
        load_s = download_bytes / bytes_per_s
        text += f": {show_bytes(download_bytes)} of weights load in {show_seconds(load_s)} or more"
        is_slow = load_s > _LONG_LOAD_S
    cure = "Set engine.start_timeout_s well above it, or take a model with fewer bytes (quantized)."
    return Finding("read rate", "warning" if is_slow else "ok", text, cure if is_slow else None)


# ---- the proxy, a stop -----------------------------------------------------------------------------------------------


def _streams(talking: Stream, silent: Stream, stream_s: float, is_public: bool) -> Iterator[Finding]:
    if talking.status in (302, 303, 401, 403) and not is_public:
        words = "the workbench asks for a login where the API key was sent"
        cure = "Set cloudera.public: true, or make a key whose audience includes applications."
        yield Finding("proxy", "bad", words, cure)
        return
    if talking.status != 200 or talking.first_s is None:
        why = talking.error or f"HTTP {talking.status}"
        cure = "Whether this machine finds names below the workbench's domain: clients must, too."
        yield Finding("proxy", "warning", f"the application's address was not reached: {why}", cure)
        return
    held = talking.is_whole and talking.first_s > stream_s / 2
    if held:
        words = f"a stream is held back: its first event came after {show_seconds(talking.first_s)}, with the last"
        yield Finding("proxy", "warning", words, _BUFFER)
    if not talking.is_whole:
        yield Finding("proxy", "warning", f"a stream is cut after {show_seconds(talking.whole_s)}", _TIMEOUT)
        return
    if not silent.is_whole:
        # The gateway's own streams are never silent for longer than a comment's 10 s.
        words = f"what is silent is cut after {show_seconds(silent.whole_s)}: answers without `stream` may be"
        yield Finding("proxy", "warning", words, _TIMEOUT)
    elif not held:
        words = f"streams pass as they are written, for {show_seconds(stream_s)}, also when silent"
        yield Finding("proxy", "ok", words)


def _stop(grace: Grace) -> Finding:
    """Of no harm: nodes and gateways end by word before they are stopped."""
    signal = "sends SIGTERM first" if grace.has_signal else "sends no SIGTERM"
    after = "does not end a process in a minute" if grace.seconds is None else f"ends it {grace.seconds:.1f} s later"
    return Finding("stop", "ok", f"a stop {signal}, and {after}; `down` and `scale` order nodes to leave before")
