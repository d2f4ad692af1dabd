"""What changed from one state to the next, as events: phases, starts with their seconds, engines' restarts, drains."""

from __future__ import annotations

import msgspec

from penstock.deployment.controller.decide import Event
from penstock.run_folder import Phase, ReplicaStatus, State
from penstock.text import show_seconds
from penstock.wire.announcement import ASLEEP, Announcement

_LEAST_SHARE = 0.01  # of a start's time, for a stage to be in the text; `seconds` has all


class Noted(msgspec.Struct, frozen=True):
    """What events exist for. `ready`: when the start began that made a replica ready; `restarted_at`: its newest
    restart; `loading`: what was said of its weights, `carried` of compiled code; `asleep`: replicas that sleep. All
    outlive a gateway, which forgets announcements when it ends. `states`: of the last look.
    """

    phase: Phase | None = None
    ready: dict[str, float | None] = {}
    restarted_at: dict[str, float] = {}
    draining: frozenset[str] = frozenset()
    loading: dict[str, str] = {}
    asleep: frozenset[str] = frozenset()
    carried: dict[str, str] = {}
    states: dict[str, str] = {}


def noted_of(state: State | None) -> Noted:
    """For a controller that continues another's work: all that the last state shows has its events."""
    return Noted() if state is None else changes(state, Noted())[1]


def changes(state: State, noted: Noted) -> tuple[tuple[Event, ...], Noted]:
    """The events of what is new in this state. Pure."""
    events = []
    if noted.phase not in (None, state.phase):
        why = f": {state.reason}" if state.reason else ""
        events.append(Event("phase", f"{noted.phase} -> {state.phase}{why}"))
    ready, restarted_at, draining = dict(noted.ready), dict(noted.restarted_at), set(noted.draining)
    loading, carried, asleep = dict(noted.loading), dict(noted.carried), set(noted.asleep)
    rows = (*state.replicas, *state.upstreams)
    for row in rows:
        name, announcement = row.replica, row.announcement
        if announcement is None:
            continue
        for restart in announcement.restarts:
            if restart.at > restarted_at.get(name, 0.0):
                restarted_at[name] = restart.at
                events.append(Event("engine restarted", restart.reason, name))
        for kind, text, before in (
            ("weights", announcement.loading, loading),
            ("carried", announcement.carried, carried),
        ):
            if text and before.get(name) != text:
                before[name] = text
                events.append(Event(kind, text, name))
        if row.state == "ready" and (name not in ready or ready[name] != announcement.started_at):
            ready[name] = announcement.started_at
            events.append(Event("replica ready", _start_text(announcement), name, announcement.start_s))
        if row.state in ("busy", "stalled") and noted.states.get(name) != row.state:
            events.append(Event(f"replica {row.state}", row.reason or "", name))
        events += _sleep_events(row, announcement, asleep)
        if row.is_draining and name not in draining:
            text = f"it finishes {row.in_flight} request{'s' if row.in_flight != 1 else ''} and gets no more"
            events.append(Event("replica draining", text, name))
        (draining.add if row.is_draining else draining.discard)(name)
    states = {row.replica: row.state for row in rows}
    names = set(states)
    draining, asleep = draining & names, asleep & names
    return tuple(events), Noted(
        state.phase, ready, restarted_at, frozenset(draining), loading, frozenset(asleep), carried, states
    )


def _sleep_events(row: ReplicaStatus, announcement: Announcement, asleep: set[str]) -> list[Event]:
    """Of falling asleep and waking; `asleep` is brought up to date."""
    name, progress = row.replica, announcement.progress
    if row.state == "sleeping" and progress is not None and progress.stage.startswith(ASLEEP) and name not in asleep:
        asleep.add(name)
        return [Event("replica asleep", progress.stage + _took(announcement, "sleep_s"), name)]
    if row.state in ("sleeping", "waking") or name not in asleep:
        return []
    asleep.discard(name)
    return [Event("replica awake", "awake" + _took(announcement, "wake_s"), name)] if row.state == "ready" else []


def _took(announcement: Announcement, name: str) -> str:
    seconds = announcement.measured.get(name)
    return "" if seconds is None else f" after {show_seconds(seconds)}"


def _start_text(announcement: Announcement) -> str:
    after_s = announcement.ready_after_s
    text = "ready" if after_s is None else f"ready after {show_seconds(after_s)}"
    least_s = _LEAST_SHARE * (after_s or 0.0)
    shown = {stage: seconds for stage, seconds in announcement.start_s.items() if seconds >= least_s}
    stages = ", ".join(f"{stage} {show_seconds(seconds)}" for stage, seconds in shown.items())
    return (f"{text}: {stages}" if stages else text) + _load_text(announcement.measured)


def _load_text(measured: dict[str, float]) -> str:
    took_s, expected_s = measured.get("load_s"), measured.get("load_expected_s")
    if took_s is None or expected_s is None:
        return ""
    return f"; weights loaded in {show_seconds(took_s)} ({show_seconds(expected_s)} expected to read them)"
