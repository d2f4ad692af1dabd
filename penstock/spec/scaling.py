"""The rules of the block `replicas`, and its schedule as numbers."""

from __future__ import annotations

import datetime
import re
import zoneinfo
from collections.abc import Iterator, Sequence

from penstock.errors import Problem
from penstock.spec.deployment import Replicas, ScheduledMin

_HOURS = re.compile(r"([01]?\d|2[0-4]):([0-5]\d)-([01]?\d|2[0-4]):([0-5]\d)\Z")
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_MINUTES_A_DAY = 24 * 60


def replicas_rules(replicas: Replicas) -> Iterator[Problem]:
    if replicas.min > replicas.max:
        yield Problem("replicas", f"min {replicas.min} is above max {replicas.max}")
    if replicas.target is not None and replicas.target <= 0:
        yield Problem("replicas.target", f"{replicas.target:g} is not above 0")
    elif replicas.target is not None and replicas.metric == "slo":
        yield Problem("replicas.target", "given, but metric is slo", "set workload.ttft_ms, or another metric")
    elif replicas.target is not None and replicas.metric == "kv" and replicas.target > 1:
        yield Problem("replicas.target", f"{replicas.target:g} is not a share of the cache", "example: 0.8")
    if replicas.target is None and replicas.metric == "rate":
        yield Problem("replicas.target", "is missing", "how many requests a second one replica is for")
    for index, floor in enumerate(replicas.schedule):
        yield from _schedule_rules(f"replicas.schedule[{index}]", floor, replicas.max)
    path = "replicas.actuator"
    if replicas.actuator != "penstock" and replicas.min == replicas.max:
        yield Problem(path, f"given, but the number is always {replicas.min}", "set replicas.max above replicas.min")
    elif replicas.actuator == "hpa" and replicas.min == 0:  # without an alpha feature gate of the cluster
        yield Problem(path, "a HorizontalPodAutoscaler does not go to 0", "set replicas.min: 1, or actuator: keda")


def _schedule_rules(path: str, floor: ScheduledMin, most: int) -> Iterator[Problem]:
    if not 0 <= floor.min <= most:
        yield Problem(f"{path}.min", f"{floor.min} is not from 0 to replicas.max, {most}")
    begin_end = _minutes(floor.hours)
    if begin_end is None or begin_end[0] == begin_end[1]:
        yield Problem(f"{path}.hours", f'"{floor.hours}" is no time of day', "example: 08:00-18:00")
    try:
        zoneinfo.ZoneInfo(floor.time_zone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        yield Problem(f"{path}.time_zone", f'"{floor.time_zone}" is no time zone', "example: Europe/Berlin")


def scheduled_min(schedule: Sequence[ScheduledMin], begin: float, end: float) -> int:
    """The largest scheduled minimum at any minute from `begin` to `end`, seconds since 1970; 0 without one."""
    moments = [*(begin + 60.0 * step for step in range(int((end - begin) // 60) + 1)), end] if schedule else []
    return max((floor.min for floor in schedule for moment in moments if _holds(floor, moment)), default=0)


def _holds(floor: ScheduledMin, moment: float) -> bool:
    first, last = _minutes(floor.hours) or (0, _MINUTES_A_DAY)
    local = datetime.datetime.fromtimestamp(moment, zoneinfo.ZoneInfo(floor.time_zone))
    minute = local.hour * 60 + local.minute
    is_past_midnight = minute < last <= first
    is_within = first <= minute < last if first < last else minute >= first or is_past_midnight
    return is_within and (not floor.days or _DAYS[(local.weekday() - is_past_midnight) % 7] in floor.days)


def _minutes(hours: str) -> tuple[int, int] | None:
    """ "08:00-18:30" -> (480, 1110)."""
    match = _HOURS.match(hours.replace(" ", ""))
    if match is None:
        return None
    first, last = (int(match[n]) * 60 + int(match[n + 1]) for n in (1, 3))
    return (first, last) if max(first, last) <= _MINUTES_A_DAY else None
