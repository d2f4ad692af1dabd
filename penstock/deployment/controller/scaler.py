"""The autoscaler of a run: once a second a sample, a decision of `scale`, and what others read of both.

The user's wish stays in desired.json, which only verbs write; the number of replicas that follows from the load is
here, and in scaling.json, from which a controller that takes over goes on.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from penstock import targets
from penstock.deployment import events, measured
from penstock.deployment.autoscale import Decision, Policy, Recent, Sample, scale
from penstock.deployment.autoscale import State as Remembered
from penstock.deployment.controller.decide import Event
from penstock.deployment.controller.load_samples import LoadSampler
from penstock.deployment.observe import Observation
from penstock.log_lines import append
from penstock.paths import is_full, write_atomically
from penstock.planner import Plan
from penstock.processes import Backoff
from penstock.run_folder import Desired, Run, State, replica
from penstock.spec.deployment import Deployment
from penstock.targets import Placement
from penstock.text import MIB, show_seconds
from penstock.wire.announcement import SERVING
from penstock.wire.scaling import Scaling

_EVERY_S = 1.0
_SLACK_S = 0.25  # ticks are late, never early
_SAMPLES_BYTES = 4 * MIB  # of samples.jsonl, and of samples.jsonl.1 before it: some hours each
_SAMPLES_KEPT = 10  # `scale` remembers what it has counted
_WRITE_EVERY_S = 10.0
_START_S = 100.0  # before the first start was measured
_NOTE_EVERY_S = 60.0  # a reason that changes while the number stays
_WAITS_KEPT = 10
_NUMBERS = re.compile(r"-?\d[\d.,]*")


class Kept(msgspec.Struct, frozen=True):
    """scaling.json. `ordered_at`: when the start of each replica was ordered, `ordered_more_at`: when more of them were
    (Unix seconds); `waits_s`: how long the last ones waited in a queue of their target."""

    replicas: int
    remembered: Remembered
    reason: str = "as the file says"
    ordered_at: dict[str, float] = {}
    waits_s: tuple[float, ...] = ()
    ordered_more_at: float = 0.0


class Look(NamedTuple):
    """What the controller knows at this moment. `failed`, `refused` and `leaving` are names of replicas: those whose
    start failed, those that the target would not place, those that end or whose machines are taken away. `asked`: the
    number that another autoscaler asks for, None where there is none or that is not known now."""

    seen: Observation
    failed: Collection[str]
    refused: Collection[str]
    leaving: Collection[str]
    asked: int | None = None


class Scaler:
    """`last`: the state that the controller before this one wrote. `now`: Unix seconds."""

    def __init__(self, run: Run, deployment: Deployment, plan: Plan, last: State | None, now: float) -> None:
        self.events: list[Event] = []
        self.retried: frozenset[str] = frozenset()  # failed replicas that are to be started again now
        self._run, self._plan, self._replicas = run, plan, deployment.replicas
        target = targets.load(deployment.target)
        self._order_every_s = target.order_every_s
        self._sampler = LoadSampler(now)
        self._samples: deque[Sample] = deque(maxlen=_SAMPLES_KEPT)
        kept = _read(run) or _first(run, last)
        self._number, self._remembered, self._ordered_more_at = kept.replicas, kept.remembered, kept.ordered_more_at
        if run.places("controller") and not target.shares_files:  # what was kept is some seconds old: none ends by it
            self._number = max(self._number, min(len(run.handle().replicas), self._replicas.max))
        self._needed = self._number  # what the load needs, where another autoscaler sets the number
        self._ordered_at, self._waits_s = dict(kept.ordered_at), kept.waits_s
        self._queued: set[str] = set()
        self._served = {row.replica for row in last.replicas if row.state in SERVING} if last is not None else set()
        self._reason, self._noted, self._noted_at = kept.reason, _NUMBERS.sub("#", kept.reason), 0.0
        self._start_s: float | None = None
        self._sampled_at = self._written_at = 0.0
        self._written_names = frozenset(kept.ordered_at)
        self._full: tuple[int, float] | None = None  # how many had room, and until when that counts
        self._full_backoff = Backoff(60.0, 900.0, 900.0)
        self._backoff, self._retry_at = Backoff(30.0, 600.0, 1800.0), 0.0
        self._failed: frozenset[str] = frozenset()
        self._failure: str | None = None

    def step(self, desired: Desired, look: Look, now: float) -> Scaling:
        """The number of replicas now, and why; `now` in Unix seconds. Blocks on the disk only."""
        self._note_starts(look, now)
        self._note_failures(look, now)
        is_due = not -_EVERY_S < now - self._sampled_at < _EVERY_S - _SLACK_S
        if is_due:
            self._sampled_at = now
            self._sample(look, now)
        before = self._number
        if desired.is_pinned:
            self._needed = desired.replicas
            self._set(desired.replicas, "pinned")
        else:
            held = look.seen.view.waiting if look.seen.view is not None else 0
            if held and self._number == 0:  # at once, not with the next sample
                self._needed, self._ordered_more_at = 1, now
                self._remembered = msgspec.structs.replace(self._remembered, asked_t=now)
                self._set(1, f"{held} request{'s' if held > 1 else ''} held, and there is no replica")
            elif is_due and self._samples:
                self._decide(look, now)
        is_new = before != self._number or self._ordered_at.keys() != self._written_names
        if is_new or now - self._written_at >= _WRITE_EVERY_S:
            self._write(now)
        if not desired.is_pinned:
            self._note(before, now)
        return self._scaling(desired, look, now)

    def _decide(self, look: Look, now: float) -> None:
        decision = self._ask(self._samples, now)
        if self._queued and decision.replicas >= self._number:
            # What waits in a queue loads nothing yet: fewer are asked for when the load needs fewer.
            without = self._ask([_without(sample, self._queued) for sample in self._samples], now)
            decision = without if without.replicas < self._number else decision
        self._remembered = decision.state
        if self._replicas.actuator == "penstock":
            self._set(*self._within(decision, now))
        else:
            self._follow(decision, look)

    def _ask(self, samples: Iterable[Sample], now: float) -> Decision:
        can, start_s = self._plan.throughput, self._expected_start_s()
        policy = Policy(self._replicas, start_s, max_running=self._plan.max_num_seqs)
        if can is not None:
            policy = Policy(self._replicas, start_s, can.prefill_tokens_s, can.decode_tokens_s, can.max_running)
        if self._plan.ttft_ms is not None:
            policy = msgspec.structs.replace(policy, ttft_s=self._plan.ttft_ms / 1000)
        before = self._number if self._replicas.actuator == "penstock" else self._needed
        remembered = msgspec.structs.replace(self._remembered, replicas=before)
        return scale(Recent(tuple(samples)), remembered, policy, now)

    def _follow(self, decision: Decision, look: Look) -> None:
        """The number that the other autoscaler sets, once it has heard what the load needs. It hears late: one replica
        for those who are held starts before, and none ends that loads or is held for."""
        self._needed, last = decision.replicas, self._samples[-1]
        asked = self._number if look.asked is None else min(max(look.asked, self._replicas.min), self._replicas.max)
        number = max(asked, min(1, self._needed))
        is_loading = any(row.state == "starting" for row in last.replicas)
        if number < self._number and (last.held or is_loading):
            number = self._number
        self._set(number, f"{self._replicas.actuator} asks for {asked}; {decision.reason}")

    def _within(self, decision: Decision, now: float) -> tuple[int, str]:
        """What is decided, as far as the target has room, takes orders, and nothing is lost by it."""
        number, reason, last = decision.replicas, decision.reason, self._samples[-1]
        is_loading = any(row.state == "starting" and row.id not in self._queued for row in last.replicas)
        if number < self._number and (last.held or is_loading):
            return self._number, f"{reason}; nothing ends while {'requests wait' if last.held else 'one starts'}"
        if self._full is not None and number > max(self._full[0], self._replicas.min):
            n_room = max(self._full[0], self._replicas.min)
            return n_room, f"{reason}; the target has room for {self._full[0]}"
        if number > self._number and self._order_every_s:
            is_early = now - self._ordered_more_at < self._order_every_s
            number = self._number + (0 if is_early else 1)
            reason = f"{reason}; at most one more in {show_seconds(self._order_every_s)}"
        if number > self._number:
            self._ordered_more_at = now
        return number, reason

    def _set(self, number: int, reason: str) -> None:
        self._number, self._reason = number, reason

    def _sample(self, look: Look, now: float) -> None:
        counted = {name: at for name, at in self._ordered_at.items() if name not in look.failed}
        sample = self._sampler.take(look.seen, look.leaving, counted, now)
        if sample is None:
            return
        self._samples.append(sample)
        _append(self._run, sample)

    # ---- starts ------------------------------------------------------------------------------------------------------

    def _note_starts(self, look: Look, now: float) -> None:
        placements = {unit.name: place for unit, place in look.seen.placements.items() if unit.kind == "replica"}
        for name in placements.keys() - self._ordered_at.keys():
            self._ordered_at[name] = now
        for name in self._ordered_at.keys() - placements.keys():
            del self._ordered_at[name]
        for name in self._starting_again(placements, look):
            self._ordered_at[name] = now
        queued = {name for name, place in placements.items() if place.state == "queued"}
        for name in sorted((self._queued - queued) & placements.keys()):
            self._waits_s = (*self._waits_s, round(now - self._ordered_at[name], 1))[-_WAITS_KEPT:]
            self._start_s = None
        self._queued = queued
        if self._full is not None and now >= self._full[1]:
            self._full = None
        if look.refused and self._full is None:
            self._full = len(placements), now + self._full_backoff.next(now)

    def _starting_again(self, placements: Mapping[str, Placement], look: Look) -> set[str]:
        """Replicas that are lost, or load once more. A gateway that does not know one says nothing."""
        rows = {row.announcement.replica: row for row in (look.seen.view.replicas if look.seen.view else ())}
        again = {name for name, place in placements.items() if place.state == "gone"}
        for name in placements.keys() - set(look.leaving):
            row, was_placed = rows.get(name), placements[name].state == "placed"
            if row is not None and row.is_alive and row.announcement.state in SERVING:
                self._served.add(name)
            elif name in self._served and (not was_placed or (row is not None and row.is_alive)):
                again.add(name)
        self._served = (self._served & placements.keys()) - again
        return again

    def _note_failures(self, look: Look, now: float) -> None:
        """A start that failed is tried again, each time later, while its replica is wanted."""
        failed = frozenset(look.failed)
        self.retried = frozenset()
        if failed - self._failed:
            pause_s = self._backoff.next(now)
            self._retry_at = now + pause_s
            self._failure = f"the start of replica {min(failed - self._failed)} failed"
            text = f"{self._failure}: the next is tried in {show_seconds(pause_s)}"
            self.events.append(Event(events.AUTOSCALE, events.decision_text(self._number, self._number, text)))
        self._failed = failed
        if not failed:
            self._retry_at = 0.0
            self._failure = None if self._serves(look) else self._failure
        elif now >= self._retry_at:
            places = look.seen.placements
            gone = {name for name in failed if replica(name) not in places or places[replica(name)].state == "gone"}
            self.retried = frozenset(name for name in gone if not _is_final(look.seen, name))
            self._ordered_at.update(dict.fromkeys(self.retried, now))

    def _serves(self, look: Look) -> bool:
        rows = look.seen.view.replicas if look.seen.view is not None else ()
        return any(row.is_alive and row.announcement.state in SERVING for row in rows)

    def _expected_start_s(self) -> float:
        """Seconds from an order to the first token: the 80th percentile of measured starts, and the median wait."""
        if self._start_s is None or self._failed:
            measured_s = measured.expected_s(measured.start_key(self._plan), 0.8)
            waits = sorted(self._waits_s)
            wait_s = waits[len(waits) // 2] if waits else 0.0
            self._start_s = (measured_s if measured_s is not None else _START_S) + wait_s
        return self._start_s

    def note_ready(self) -> None:
        """A start was measured."""
        self._start_s = None

    # ---- what others read --------------------------------------------------------------------------------------------

    def _scaling(self, desired: Desired, look: Look, now: float) -> Scaling:
        rows = {row.announcement.replica: row for row in (look.seen.view.replicas if look.seen.view else ())}
        coming = [
            at
            for name, at in self._ordered_at.items()
            if name not in {*look.failed, *look.leaving}
            and not (name in rows and rows[name].announcement.state in SERVING)
        ]
        begins = min(coming) if coming else self._retry_at if self._retry_at else now if self._number else None
        ready_at = None if begins is None or self._serves(look) else begins + self._expected_start_s()
        return Scaling(
            replicas=self._number,
            least=self._replicas.min,
            most=self._replicas.max,
            reason=self._reason,
            is_pinned=desired.is_pinned,
            ready_at=None if ready_at is None else round(ready_at),
            failure=self._failure,
            published=None if self._replicas.actuator == "penstock" else self._needed,
        )

    def _note(self, before: int, now: float) -> None:
        """An event of a new number, and of a reason of another kind."""
        kind = _NUMBERS.sub("#", self._reason)
        is_new = kind != self._noted and now - self._noted_at >= _NOTE_EVERY_S
        if before != self._number or is_new:
            self._noted, self._noted_at = kind, now
            self.events.append(Event(events.AUTOSCALE, events.decision_text(before, self._number, self._reason)))

    def _write(self, now: float) -> None:
        self._written_at, self._written_names = now, frozenset(self._ordered_at)
        kept = Kept(
            self._number, self._remembered, self._reason, self._ordered_at, self._waits_s, self._ordered_more_at
        )
        try:
            write_atomically(self._run.scaling_file, msgspec.json.encode(kept))
        except OSError as exc:
            if not is_full(exc):
                raise


def _without(sample: Sample, names: Collection[str]) -> Sample:
    rows = tuple(row for row in sample.replicas if row.id not in names)
    return msgspec.structs.replace(sample, replicas=rows)


def _is_final(seen: Observation, name: str) -> bool:
    placement = seen.placements.get(replica(name))
    return placement is not None and placement.is_final


def _first(run: Run, last: State | None) -> Kept:
    """Where nothing is kept: as many as there were, or are, or as the file says."""
    before = last.scaling if last is not None else None
    number = before.replicas if before is not None else max(run.desired().replicas, len(run.handle().replicas))
    return Kept(number, Remembered(replicas=number))


def _read(run: Run) -> Kept | None:
    try:
        return msgspec.json.decode(run.scaling_file.read_bytes(), type=Kept)
    except (OSError, msgspec.MsgspecError):
        return None


def _append(run: Run, sample: Sample) -> None:
    try:
        append(run.samples_file, msgspec.json.encode(sample) + b"\n", _SAMPLES_BYTES)
    except OSError as exc:
        if not is_full(exc):
            raise
