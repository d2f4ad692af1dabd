"""How many replicas the load needs: `scale` maps what was seen and what is remembered to a number and one sentence.

Pure: no clock, no input or output. A sample is one second as gateways and announcements saw it; the controller records
the same lines, which `penstock autoscale replay` reads.

Theory of operation. Load is work: a request is `prompt / prefill rate + output / decode rate` seconds of one replica,
so that the work that arrives in a second is a number of replicas. Output is not known when a request arrives; the mean
of finished requests stands for it. Two questions are asked each second, and the larger answer is the need:

- What does the load of the last two minutes need? A reserve that grows with the root of the load carries its noise.
- What did the last seconds need? Work W that came within s seconds can be served in time by W / (s + slack) replicas.

A queue is no load. While one stands, two and a half times the reserve is wanted, over the highest load of two minutes:
never more, however long the queue is. One exception, since rates may be wrong: a queue that gets no shorter for a
minute in which nothing starts orders one more. A dip begins it again: replicas that shorten a queue do what comes.

What was needed once is kept for a time. Each number of replicas remembers when it was needed last, and the pauses after
which it was needed again; it is kept over a pause where that cost less, in the past, than having to start again.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, Literal

import msgspec

from penstock.spec.deployment import Replicas, ScalingRules
from penstock.spec.scaling import scheduled_min

# Samples that are older say nothing of now: then nothing ends.
STALE_S = 15.0
_WINDOW_S, _SPANS_S = 120, (2, 4, 8, 15, 30, 60)
# Answers are written over seconds, so that their work never counts over less than this.
_DECODE_SPAN_S = 30
_NO_LOAD: dict[str, Any] = {"prefill": (), "decode": (), "part": (0.0, 0.0, 0.0)}
_LEAST_PART_S = 0.75  # samples that come faster are counted together
_FIRST_S = 20  # a mean of fewer seconds is one of these with nothing before
_ENOUGH_REQUESTS = 20.0  # for a mean
# A queue of so many seconds is more than a few requests that came at once, and wants so many times the reserve; one
# that gets no shorter for so many is more than the replicas can do.
_LEAST_QUEUE_S, _QUEUE_RESERVES, _STANDING_S = 10.0, 2.5, 60.0
_MEMORY = 0.999  # of the means of requests, a second: 1,000 s
_LEAST_HOLD_S, _MOST_HOLD_S = 150.0, 900.0
_DEAD_BAND = 0.4
# A second without a replica that is needed costs as much as so many seconds of a replica that is not: least where the
# promise is kept, and more for each part of the last hour's first tokens that was late.
_LEAST_PRICE, _MOST_PRICE, _PRICE_OF_LATE = 50.0, 160.0, 2000.0
_GOOD_SHARE, _HOUR_MEMORY = 0.985, 0.9997
# At the highest price: so much longer is the least hold, and the longest; so many roots of the load are in reserve.
_DEAR_LEAST, _DEAR_MOST, _DEAR_RESERVE = 1.5, 2.0, 0.7
_QUICK_S = 100.0  # with longer starts more tokens are late whatever is kept: the price rises less
_HOLD_STARTS = 0.6
_N_PAUSES, _SHORT_PAUSE_S = 8, 30.0
_MOST_LEVELS = 512
_MOST_CAUTION = 1.5
# What is divided by the target, where the file has none.
_TARGETS = {"waiting": 10.0, "in_flight": 64.0, "kv": 0.8, "rate": 1.0}
_HPA_MOST_S = 3600.0


class ReplicaSample(msgspec.Struct, frozen=True):
    """One replica in one second: seconds since its start was ordered, requests in it, share of its KV cache in use."""

    id: str = ""
    state: Literal["starting", "ready", "draining"] = "ready"
    age_s: float = 0.0
    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0


class Sample(msgspec.Struct, frozen=True):
    """One second. `t`: seconds since any fixed moment (since 1970 where a schedule is given).

    `arrivals` requests with `prompt_tokens` came in it, `output_tokens` were generated. `in_flight`: requests that have
    no complete answer, `held` of them in the gateway. `ttft_good` of `ttft_total` first tokens kept the promise.
    """

    t: float
    arrivals: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    in_flight: int = 0
    held: int = 0
    ttft_good: int = 0
    ttft_total: int = 0
    replicas: tuple[ReplicaSample, ...] = ()


class Recent(msgspec.Struct, frozen=True):
    """Samples in any order. Those up to `State.t` have been counted, so the ones since the last decision suffice."""

    samples: tuple[Sample, ...] = ()


class Policy(msgspec.Struct, frozen=True):
    """What is asked, and what one replica is and can: seconds from the order to the first token, prefill and decode
    tokens/s when it does only that, requests that run at once, KV tokens/s being measured where they are not known."""

    replicas: Replicas = Replicas()
    start_s: float = 100.0
    prefill_tokens_s: float = 12_000.0
    decode_tokens_s: float = 1_500.0
    max_running: int = 64
    ttft_s: float = 2.0


class Level(msgspec.Struct, frozen=True):
    """One number of replicas: when the load needed it last, and since when without a pause.

    `pauses`: (seconds until it was needed again, seconds that it had been needed), the newest last.
    """

    needed_t: float
    since_t: float
    pauses: tuple[tuple[float, float], ...] = ()


class Means(msgspec.Struct, frozen=True):
    """What requests are like: sums that forget over 1,000 s. `hour_good`, `hour_total`: first tokens of about an hour.
    `caution`: what the load is multiplied by, more than 1 after a queue that got no shorter."""

    requests: float = 0.0
    prompts_s: float = 0.0
    finished: float = 0.0
    output_tokens: float = 0.0
    hour_good: float = 0.0
    hour_total: float = 0.0
    caution: float = 1.0


class State(msgspec.Struct, frozen=True):
    """What `scale` remembers between decisions; serialises to JSON. `State()` begins.

    `prefill`, `decode`: the work that came in each of the last 120 s, `part` (seconds, prefill, decode) an unfinished
    second. `highs`: (when, the load of the busiest span then) of the last 120 s, without those that a later one
    exceeds. `asked_t`: when there was a request last. `queued_s`: for how long a queue has not been empty; `standing`:
    for how long it got no shorter while nothing started, and the least that waited. `wanted`: (since when, how many)
    before limits, `changes`: the same after them, as far back as `up` and `down` look.
    """

    t: float | None = None
    replicas: int | None = None
    in_flight: int = 0
    asked_t: float = 0.0
    queued_s: float = 0.0
    standing: tuple[float, int] = (0.0, 0)
    prefill: tuple[float, ...] = ()
    decode: tuple[float, ...] = ()
    part: tuple[float, float, float] = (0.0, 0.0, 0.0)
    highs: tuple[tuple[float, float], ...] = ()
    means: Means = Means()
    levels: tuple[Level, ...] = ()
    wanted: tuple[tuple[float, int], ...] = ()
    changes: tuple[tuple[float, int], ...] = ()


class Decision(msgspec.Struct, frozen=True):
    """How many replicas there should be, what to pass to the next call, and why, in one sentence with its numbers."""

    replicas: int
    state: State
    reason: str


class _Need(msgspec.Struct, frozen=True):
    """Replicas that are needed, not rounded, the words for it; and without those that a queue adds, which nothing keeps
    when it is empty."""

    replicas: float
    words: str
    kept: float | None = None


def scale(recent: Recent, state: State, policy: Policy, now: float) -> Decision:
    """The number of replicas wanted at `now`, between `min` and `max`. Pure; equal inputs give equal decisions.

    More load in the new samples never gives fewer replicas: what a request is like is that of the state, which the new
    samples change for the next call.
    """
    asked = policy.replicas
    if state.t is not None and now < state.t - STALE_S:
        state = _moved(state, now - state.t - 1.0)
    samples = sorted((each for each in recent.samples if each.t <= now + STALE_S), key=lambda sample: sample.t)
    before = _before(state, samples, asked)
    if not samples or now - samples[-1].t > STALE_S:
        return _decided(state, max(before, _floor(policy, now)), asked, f"keeps {before}: no sample for {STALE_S:g} s")
    new = [sample for sample in samples if state.t is None or sample.t > state.t]
    if not new:
        return _decided(state, before, asked, f"keeps {before}: no sample since the last decision")
    if state.t is not None and new[0].t - state.t > STALE_S:
        gap_s = new[0].t - state.t - 1.0
        state = msgspec.structs.replace(_moved(state, gap_s), **_NO_LOAD)
    if state.t is None:
        state = _begun(new[0], before)
    last, counted = new[-1], _counted(state, new, policy)
    if asked.metric == "slo":
        need, counted = _slo_need(state, counted, last, policy)
    else:
        need = _metric_need(counted, last, policy)
    wanted, counted, reason = _kept(counted, need, before, policy, last.t, _dear(state.means, policy))
    number, reason = _guarded(wanted, before, last, counted, policy, reason)
    number, counted, reason = _limited(number, before, counted, asked, last.t, reason)
    floor = _floor(policy, last.t)
    if floor > max(number, asked.min):
        number, reason = floor, f"needs {floor}: the schedule's minimum until {policy.start_s:.0f} s from now"
    return _decided(counted, number, asked, reason)


def _before(state: State, samples: list[Sample], asked: Replicas) -> int:
    if state.replicas is not None:
        return _bounded(state.replicas, asked)
    live = sum(replica.state != "draining" for replica in samples[-1].replicas) if samples else 0
    return _bounded(live, asked)


def _decided(state: State, number: int, asked: Replicas, reason: str) -> Decision:
    bounded = _bounded(number, asked)
    if bounded != number:
        reason = f"{reason}; {'max' if bounded < number else 'min'} is {bounded}"
    if bounded != state.replicas and state.t is not None and (asked.up or asked.down):
        begin = state.t - _HPA_MOST_S
        past = state.changes or ((begin, state.replicas if state.replicas is not None else bounded),)
        kept = [row for row, following in itertools.pairwise(past) if following[0] > begin]
        changes = (*kept, past[-1], (state.t, bounded))
        state = msgspec.structs.replace(state, changes=changes)
    return Decision(bounded, msgspec.structs.replace(state, replicas=bounded), reason)


def _bounded(number: int, asked: Replicas) -> int:
    return min(max(number, asked.min), asked.max)


def _floor(policy: Policy, now: float) -> int:
    return scheduled_min(policy.replicas.schedule, now, now + policy.start_s)


# ---- time ------------------------------------------------------------------------------------------------------------


def _moved(state: State, by_s: float) -> State:
    """The state as if all of it had happened `by_s` later: a jump of the clock or a gap in samples ages nothing."""
    levels = tuple(
        msgspec.structs.replace(level, needed_t=level.needed_t + by_s, since_t=level.since_t + by_s)
        for level in state.levels
    )
    return msgspec.structs.replace(
        state,
        t=None if state.t is None else state.t + by_s,
        asked_t=state.asked_t + by_s,
        levels=levels,
        highs=tuple((t + by_s, load) for t, load in state.highs),
        wanted=tuple((t + by_s, number) for t, number in state.wanted),
        changes=tuple((t + by_s, number) for t, number in state.changes),
    )


def _begun(first: Sample, before: int) -> State:
    """What was there before is kept for a while, since nothing is known of the load that it was for."""
    t = first.t - 1.0
    levels = tuple(Level(t, t) for _ in range(min(before, _MOST_LEVELS)))
    in_flight = max(0, first.in_flight - first.arrivals)
    return State(t=t, replicas=before, asked_t=t, levels=levels, in_flight=in_flight)


def _counted(state: State, new: list[Sample], policy: Policy) -> State:
    """The state with the counts of new samples: those of a sample came since the one before it."""
    prefill, decode = [*state.prefill], [*state.decode]
    means, t = state.means, state.t or 0.0
    in_flight, asked_t, n_output = state.in_flight, state.asked_t, _mean_output(state.means)
    queued_s, standing = state.queued_s, state.standing
    part_s, read_s, write_s = state.part
    for sample in new:
        elapsed = min(sample.t - t, STALE_S)
        t, part_s = sample.t, part_s + elapsed
        # Tokens that are written saturate when replicas do; what will be written does not.
        tokens = sample.output_tokens if n_output is None else sample.arrivals * n_output
        read, write = sample.prompt_tokens / policy.prefill_tokens_s, tokens / policy.decode_tokens_s
        means = _averaged(means, sample, read, in_flight, elapsed)
        read_s, write_s = read_s + read, write_s + write
        if part_s >= _LEAST_PART_S or not prefill:
            prefill += [read_s / part_s] * max(1, round(part_s))
            decode += [write_s / part_s] * max(1, round(part_s))
            part_s, read_s, write_s = 0.0, 0.0, 0.0
        in_flight, queued_s = sample.in_flight, queued_s + elapsed if _queues(sample) else 0.0
        standing = _standing(standing, sample, elapsed)
        if sample.arrivals or sample.in_flight or sample.held:
            asked_t = sample.t
    return msgspec.structs.replace(
        state,
        t=t,
        in_flight=in_flight,
        asked_t=asked_t,
        queued_s=queued_s,
        standing=standing,
        prefill=tuple(prefill[-_WINDOW_S:]),
        decode=tuple(decode[-_WINDOW_S:]),
        part=(part_s, read_s, write_s),
        means=_with_caution(means, state, policy.replicas.max),
    )


def _queues(sample: Sample) -> bool:
    """Requests are held, or wait in every engine."""
    ready = [replica.waiting > 0 for replica in sample.replicas if replica.state == "ready"]
    return sample.held > 0 or (all(ready) and bool(ready))


def _waiting(sample: Sample) -> int:
    return sample.held + sum([replica.waiting for replica in sample.replicas])


def _standing(before: tuple[float, int], sample: Sample, elapsed: float) -> tuple[float, int]:
    waiting, (standing_s, least) = _waiting(sample), before
    starts = any(replica.state == "starting" for replica in sample.replicas)
    if starts or waiting < least or not _queues(sample):
        return 0.0, waiting
    return standing_s + elapsed, waiting if standing_s < _LEAST_QUEUE_S else least


def _averaged(means: Means, sample: Sample, read_s: float, in_flight: int, elapsed: float) -> Means:
    decay, hour = _MEMORY**elapsed, _HOUR_MEMORY**elapsed
    finished = max(0, in_flight + sample.arrivals - sample.in_flight)
    return Means(
        requests=means.requests * decay + sample.arrivals,
        prompts_s=means.prompts_s * decay + read_s,
        finished=means.finished * decay + finished,
        output_tokens=means.output_tokens * decay + sample.output_tokens,
        hour_good=means.hour_good * hour + sample.ttft_good,
        hour_total=means.hour_total * hour + sample.ttft_total,
        caution=means.caution,
    )


def _mean_output(means: Means) -> float | None:
    return means.output_tokens / means.finished if means.finished >= _ENOUGH_REQUESTS else None


def _with_caution(means: Means, before: State, most: int) -> Means:
    """While a queue stands and nothing starts, replicas can do less than the policy says."""
    if before.standing[0] > _STANDING_S and (before.replicas or 0) < most:
        return msgspec.structs.replace(means, caution=min(_MOST_CAUTION, means.caution * 1.005))
    return msgspec.structs.replace(means, caution=max(1.0, means.caution * 0.9998))


# ---- what the load needs ---------------------------------------------------------------------------------------------


def _slo_need(before: State, state: State, last: Sample, policy: Policy) -> tuple[_Need, State]:
    """What the load needs, or a queue; the state that knows of this load."""
    count, caution = len(state.prefill), before.means.caution
    read = list(itertools.accumulate(reversed(state.prefill)))
    written = list(itertools.accumulate(reversed(state.decode)))
    mean = caution * (read[-1] + written[-1]) / max(count, _FIRST_S)
    # A start of minutes needs more: what comes meanwhile cannot be answered by another replica.
    share = 0.3 + 0.2 * min(1.0, max(0.0, (policy.start_s - 100) / 200))
    dear = _dear(before.means, policy)
    need, high = mean + share * math.sqrt(mean), mean
    best = _Need(need, f"the load of {count} s is {mean:.2f} replicas, {need:.2f} with a reserve")
    for span in _SPANS_S:
        if span <= count:
            long = min(count, max(span, _DECODE_SPAN_S))
            value = caution * (read[span - 1] / (span + policy.ttft_s / 2) + written[long - 1] / long)
            high = max(high, value)
            value += _DEAR_RESERVE * dear * math.sqrt(value)
            if value > best.replicas:
                best = _Need(value, f"the last {span} s brought the work of {value:.2f} replicas")
    highs = (*(row for row in state.highs if row[1] > high and last.t - row[0] < _WINDOW_S), (last.t, high))
    state, kept, highest = msgspec.structs.replace(state, highs=highs), best.replicas, highs[0][1]
    most = highest + _QUEUE_RESERVES * share * math.sqrt(highest)
    if state.queued_s > max(policy.ttft_s, _LEAST_QUEUE_S) and most > kept:
        words = (
            f"requests wait for {state.queued_s:.0f} s, the load of {_WINDOW_S} s was at most {highest:.2f} replicas"
        )
        best = _Need(most, f"{words}, {most:.2f} with their reserve", kept)
    live = sum([replica.state != "draining" for replica in last.replicas])
    if state.standing[0] > _STANDING_S and live + 1 > best.replicas:
        # Whatever the rates promise: what there is does not do.
        words = f"{_waiting(last)} requests wait, no fewer for {state.standing[0]:.0f} s, and no replica starts"
        best = _Need(live + 1, words, kept)
    return best, state


def _metric_need(state: State, last: Sample, policy: Policy) -> _Need:
    """The sum over all replicas divided by the target; where requests wait, next to those that run."""
    asked = policy.replicas
    target = asked.target or _TARGETS[asked.metric]
    replicas = [replica for replica in last.replicas if replica.state != "draining"]
    waiting = _waiting(last)
    if asked.metric == "waiting":
        running = sum([replica.running for replica in last.replicas]) / policy.max_running
        return _Need(
            running + waiting / target, f"{waiting} requests wait at {target:g} a replica, others fill {running:.2f}"
        )
    if asked.metric == "in_flight":
        return _Need(last.in_flight / target, f"{last.in_flight} requests are in flight at {target:g} a replica")
    if asked.metric == "kv":
        use = sum([replica.kv_use for replica in replicas])
        return _Need(use / target + (1.0 if last.held else 0.0), f"{use:.2f} caches are in use at {target:g} a replica")
    rate = state.means.requests * (1 - _MEMORY)
    return _Need(rate / target, f"{rate:.2f} requests/s at {target:g} a replica")


# ---- how long it is kept ---------------------------------------------------------------------------------------------


def _dear(means: Means, policy: Policy) -> float:
    """What a replica is worth that is missed: 0 is the least price, 1 the highest."""
    if means.hour_total < _ENOUGH_REQUESTS:
        return 0.0
    late = max(0.0, _GOOD_SHARE - means.hour_good / means.hour_total)
    share = min(1.0, _PRICE_OF_LATE * late / (_MOST_PRICE - _LEAST_PRICE))
    return share * min(1.0, _QUICK_S / max(policy.start_s, 1.0))


def _kept(state: State, need: _Need, before: int, policy: Policy, now: float, dear: float) -> tuple[int, State, str]:
    """How many to have, with those that were needed a short time ago; the state that knows of this need; why."""
    order = math.ceil(need.replicas - 1e-9)
    kept = need.replicas if need.kept is None else need.kept
    marked = max(math.ceil(kept - 1e-9), min(before, math.floor(kept + 1 + _DEAD_BAND)))
    levels = [*state.levels]
    for index in range(min(marked, policy.replicas.max, _MOST_LEVELS)):
        if index == len(levels):
            levels.append(Level(now, now))
        else:
            levels[index] = _needed(levels[index], now)
    number, reason = order, f"needs {order}: {need.words}"
    has_window = policy.replicas.down is not None and policy.replicas.down.stabilization_window_seconds is not None
    for index in range(min(before, len(levels)), order, -1):
        hold_s = 0.0 if has_window else _hold_s(levels[index - 1].pauses, policy, dear)
        past_s = now - levels[index - 1].needed_t
        if past_s <= hold_s:
            number = index
            reason = f"keeps {index}: needed {past_s:.0f} s ago, kept for {hold_s:.0f} s; now {need.words}"
            break
    return number, msgspec.structs.replace(state, levels=tuple(levels)), reason


def _needed(level: Level, now: float) -> Level:
    pause = now - level.needed_t
    if pause <= _SHORT_PAUSE_S:
        return Level(now, level.since_t, level.pauses)
    return Level(now, now, (*level.pauses, (pause, level.needed_t - level.since_t))[-_N_PAUSES:])


def _hold_s(pauses: tuple[tuple[float, float], ...], policy: Policy, dear: float) -> float:
    """The time that would have cost least in these pauses, and in half of one that never ends.

    A pause that is held costs its seconds; one that is not, the hold, and the start while the replica was missed.
    """
    price = _LEAST_PRICE + (_MOST_PRICE - _LEAST_PRICE) * dear
    least_s = max(_LEAST_HOLD_S, min(_MOST_HOLD_S, _HOLD_STARTS * policy.start_s)) * (1.0 + _DEAR_LEAST * dear)
    most_s = max(_MOST_HOLD_S, 3 * policy.start_s) * (1.0 + _DEAR_MOST * dear)
    best, least_cost = least_s, math.inf
    for hold in sorted({least_s, *(min(most_s, max(least_s, 1.15 * pause + 10)) for pause, _ in pauses)}):
        cost, weight = 0.5 * hold, 1.0
        for pause, busy in reversed(pauses):
            cost += weight * (pause if pause <= hold else hold + price * min(policy.start_s, busy + 20.0))
            weight *= 0.8
        if cost < least_cost:
            best, least_cost = hold, cost
    return best


# ---- limits ----------------------------------------------------------------------------------------------------------


def _guarded(number: int, before: int, last: Sample, state: State, policy: Policy, reason: str) -> tuple[int, str]:
    """Nothing ends while something starts or is held for; the last replica ends after `idle_s` only, and the first one
    starts for a request, not for what past load needed."""
    longest_s = 3 * policy.start_s + 60  # one that starts for ever holds nothing up
    starting = sum(replica.state == "starting" and replica.age_s <= longest_s for replica in last.replicas)
    if number < before and (starting or last.held):
        why = f"{starting} still start" if starting else f"{last.held} requests are held"
        number, reason = before, f"keeps {before}: {why}; {reason}"
    idle_s, quiet_s = max(policy.replicas.idle_s, 3 * policy.start_s), last.t - state.asked_t
    is_asked = last.held or last.in_flight or last.arrivals
    if number and not before and not is_asked:
        return 0, f"keeps 0: no request for {quiet_s:.0f} s"
    if number and not starting and not is_asked and policy.replicas.min == 0 and quiet_s >= idle_s:
        return 0, f"needs 0: no request for {quiet_s:.0f} s, idle_s is {idle_s:.0f}"
    if number < 1 and is_asked:
        return 1, "needs 1: a request came and there is no replica"
    if number < 1 <= before and quiet_s < idle_s:
        return 1, f"keeps 1: the last request was {quiet_s:.0f} s ago, idle_s is {idle_s:.0f}"
    return number, reason


def _limited(
    number: int, before: int, state: State, asked: Replicas, now: float, reason: str
) -> tuple[int, State, str]:
    """`up` and `down`, as HPA v2 has them."""
    if asked.up is None and asked.down is None:
        return number, state, reason
    begin = now - _HPA_MOST_S
    kept = [row for row, following in itertools.pairwise(state.wanted) if following[0] > begin]
    wanted = (*kept, *state.wanted[-1:])
    if not wanted or wanted[-1][1] != number:
        wanted = (*wanted, (now, number))
    state = msgspec.structs.replace(state, wanted=wanted)
    limited = number
    if number > before and asked.up is not None:
        limited = max(before, min(_within(wanted, asked.up, now)))
        limited = min(limited, _most_up(asked.up, before, state.changes, now))
    elif number < before and asked.down is not None:
        limited = min(before, max(_within(wanted, asked.down, now)))
        limited = max(limited, _least_down(asked.down, before, state.changes, now))
    if limited != number:
        reason = f"{reason}; {'up' if number > before else 'down'} allows {limited}"
    return limited, state, reason


def _within(wanted: tuple[tuple[float, int], ...], rules: ScalingRules, now: float) -> list[int]:
    """The numbers wanted within the stabilization window."""
    begin = now - (rules.stabilization_window_seconds or 0)
    ends = [*(t for t, _ in wanted[1:]), math.inf]
    return [number for (_, number), end in zip(wanted, ends, strict=True) if end > begin]


def _at(changes: tuple[tuple[float, int], ...], before: int, moment: float) -> int:
    """How many there were at `moment`."""
    earlier = [number for t, number in changes if t <= moment]
    return (earlier or [number for _, number in changes[:1]] or [before])[-1]


def _most_up(rules: ScalingRules, before: int, changes: tuple[tuple[float, int], ...], now: float) -> int:
    if rules.select_policy == "Disabled":
        return before
    limits = []
    for policy in rules.policies:
        base = min(before, _at(changes, before, now - policy.period_seconds))
        more = policy.value if policy.type == "Pods" else math.ceil(base * policy.value / 100)
        limits.append(max(before, base + more, 1))
    choose = max if rules.select_policy == "Max" else min
    return choose(limits) if limits else _MOST_LEVELS * 1000


def _least_down(rules: ScalingRules, before: int, changes: tuple[tuple[float, int], ...], now: float) -> int:
    if rules.select_policy == "Disabled":
        return before
    limits = []
    for policy in rules.policies:
        base = max(before, _at(changes, before, now - policy.period_seconds))
        fewer = policy.value if policy.type == "Pods" else base - math.floor(base * (1 - policy.value / 100))
        limits.append(min(before, max(0, base - fewer)))
    choose = min if rules.select_policy == "Max" else max
    return choose(limits) if limits else 0
