"""What the commands show, as text. Formats only; `cli` prints."""

from __future__ import annotations

import dataclasses
import math
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import targets
from penstock.cli.output import table
from penstock.deployment import live, observe
from penstock.hardware import Machine
from penstock.planner import Device, Plan
from penstock.run_folder import Part, ReplicaStatus, Run, State
from penstock.spec.blocks import SHARED
from penstock.text import printable, show_bytes, show_seconds, show_usd
from penstock.wire.announcement import ACTIVE, Progress, Restart
from penstock.wire.scaling import Scaling

if TYPE_CHECKING:
    from penstock.deployment.prepare import Prepared
    from penstock.deployment.start import Started
    from penstock.errors import Finding


_SHOWN_STARTS = 8
_WEEKDAY_S = 6 * 86400.0  # for so long a weekday alone says which


def command_name() -> str:
    """How the user starts penstock: by name when that is on the PATH, else by the path to it."""
    here = Path(sys.executable).with_name("penstock")
    on_path = shutil.which("penstock")
    if on_path and Path(on_path).resolve() == here.resolve():
        return "penstock"
    try:
        return str(here.relative_to(Path.cwd()))
    except ValueError:
        return str(here) if here.exists() else "penstock"


def progress_text(replica: ReplicaStatus) -> str:
    """One replica's way to ready in words: "weights, shard 17/30, 2.1 GB/s, about 40.0 s left"."""
    progress = replica.announcement.progress if replica.announcement else None
    if replica.state in (*ACTIVE, "draining"):
        return ""
    if replica.state == "queued":
        when = time.strftime("%a %H:%M", time.localtime(replica.starts_at)) if replica.starts_at else ""
        return ", ".join(filter(None, (replica.reason, when and f"starts about {when} (the queue's estimate)")))
    if replica.state in ("failed", "gone", "broken", "silent") or progress is None:
        return replica.reason or ""
    return progress_words(progress)


def progress_words(progress: Progress) -> str:
    words = [progress.stage]
    if progress.shards_total:
        words.append(f"shard {progress.shards_done}/{progress.shards_total}")
    if progress.bytes_per_s:
        words.append(f"{show_bytes(progress.bytes_per_s)}/s")
    if progress.eta_s is not None and math.isfinite(progress.eta_s):
        words.append(f"about {show_seconds(progress.eta_s)} left")
    return ", ".join(words)


def ready_text(run: Run, state: State, started: Started) -> str:
    plan, me = run.plan(), command_name()
    if not state.desired_replicas:
        wait, wakes = show_seconds(run.deployment().gateway.hold_s), _wakes(state)
        lines = [
            f"{run.name} has no replica: a request {'starts one and ' if wakes else ''}waits {wait}, then gets 503"
        ]
        lines += [f"  address  {_address(run)}"]
        lines += [] if wakes else [f"  next     {me} scale {run.name} 1"]
        return "\n".join([*lines, *_key_lines(started.key, run)] if started.key else lines)
    slowest = max((r.announcement.ready_after_s or 0.0 for r in state.replicas if r.announcement), default=0.0)
    was = "runs already" if started.was_running else f"is ready (its engine took {show_seconds(slowest)})"
    lines = [
        f"{run.name} {was}: {plan.model.reference} on {plan.engine} {plan.engine_version}, "
        f"{len(state.replicas)} replica{'s' if len(state.replicas) != 1 else ''}",
        f"  address  {_address(run)}   model {plan.served_names[0]}",
    ]
    if started.key:
        lines += _key_lines(started.key, run)
    lines += [f"  {name}   {text}" for name, text in _kv_cache_facts(plan, state)]
    only = f" {run.name}" if run.name != "penstock-demo" else ""
    if state.ui is not None:
        lines.append(f"  page     {_page(run, state.ui)}   open it: {me} ui{only}")
    lines.append(f"  next     {me} chat{only}   {me} status{only}   {me} down{only}")
    return "\n".join(lines)


def submitted_text(started: Started, run: Run) -> str:
    """What an `up` says that may not be there any more when the deployment is ready."""
    lines = [f"{started.name} is starting; watch it with: {command_name()} status {started.name}"]
    return "\n".join([*lines, *_key_lines(started.key, run)] if started.key else lines)


def _key_lines(key: str, run: Run) -> list[str]:
    lines = [f"  key      {key}   (shown this once: export OPENAI_API_KEY={key})"]
    if _is_in_a_cluster(run):
        lines.append(f"  clients  need a key; more: penstock keys create NAME --deployment {run.name}")
    elif run.deployment().target in SHARED:
        lines.append("  clients  need a key, since others may log in to this machine; more: penstock keys create NAME")
    return lines


def prepared_text(prepared: Prepared) -> str:
    from penstock.spec import reading

    plan = prepared.plan
    parts = [
        "# the deployment, all defaults filled in",
        reading.to_yaml(prepared.deployment).rstrip(),
        "",
        f"# the plan: {plan.engine} {plan.engine_version} on {plan.device}, "
        f"{plan.layout.n_ranks} rank(s) a replica, {plan.max_model_len} tokens a request",
        f"# memory a replica: {_need_text(plan)}; {_memory_text(prepared.machine, plan.device)}",
        *(f"# warning: {warning}" for warning in plan.warnings),
        "",
    ]
    for name, text in prepared.artifact.files.items():
        parts += [f"# file artifact/{name}", text.rstrip(), ""]
    parts += ["# started for each replica", shlex.join(prepared.artifact.argv)]
    return "\n".join(parts)


def _need_text(plan: Plan) -> str:
    need = plan.need
    if plan.device == "cuda" and not need.kv_cache_bytes:  # its model is not modelled
        return f"weights {show_bytes(need.weights_bytes)}, the rest is not planned"
    return (
        f"{show_bytes(need.total_bytes)} = weights {show_bytes(need.weights_bytes)} + KV cache "
        f"{show_bytes(need.kv_cache_bytes)} + engine {show_bytes(need.overhead_bytes)} (estimate)"
    )


def _memory_text(machine: Machine, device: Device) -> str:
    gpus = machine.gpus
    free_bytes = machine.memory_free_bytes if device == "cpu" else sum(gpu.memory_free_bytes for gpu in gpus)
    has = f"{machine.host} has" if device == "cpu" else f"{len(gpus)} x {gpus[0].name} in {machine.host} have"
    return f"{has} {'an unknown amount' if machine.assumed or free_bytes is None else show_bytes(free_bytes)} free"


def list_text(rows: Sequence[tuple[Run, State]]) -> str:
    cells = []
    for run, state in rows:
        n_ready = sum(replica.state in ACTIVE for replica in state.replicas)
        count = f"{n_ready}/{state.desired_replicas}"
        plan = run.plan()
        url, _, login = live.shown(run)
        address = f"{url or '-'}{f' behind {_short_login(login)}' if login is not None else ''}"
        cells.append((run.name, state.phase, count, plan.engine, address, plan.model.reference))
    return table(cells, ("NAME", "STATE", "REPLICAS", "ENGINE", "ADDRESS", "MODEL"))


def status_text(run: Run, state: State, now: float) -> str:
    plan, cost = run.plan(), observe.cost_usd(run)
    facts = [
        *([] if state.scaling is None else [("replicas", scaling_words(state.scaling))]),
        ("model", f"{plan.model.reference} on {plan.engine} {plan.engine_version} ({plan.device})"),
        ("address", _address(run)),
        ("requests", f"{state.requests_total} served since its gateway started"),
        *([] if cost is None else [("cost", f"{show_usd(cost)} for all requests so far")]),
        *([] if state.prometheus is None else [("prometheus", _child(state.prometheus))]),
        *([] if state.ui is None else [("chat page", _page(run, state.ui))]),
        ("folder", str(run.path)),
        ("started", f"{show_seconds(now - run.record().created_at)} ago"),
        *_kv_cache_facts(plan, state),
    ]
    lines = [f"{run.name} is {state.phase}" + (f": {state.reason}" if state.reason else "")]
    if state.phase == "ready" and _sleeps(state):
        lines = [f"{run.name} sleeps; a request wakes it, or: {command_name()} wake {run.name}"]
    if state.phase == "ready" and not state.desired_replicas and _wakes(state):
        lines = [f"{run.name} has no replica: the next request starts one"]
    elif state.phase == "ready" and not state.desired_replicas:
        lines = [f"{run.name} has no replica; start one: {command_name()} scale {run.name} 1"]
    lines += [table(facts, indent=2), ""]
    rows = [_part_row("controller", state.controller), _part_row("gateway", state.gateway)]
    rows += [] if state.prometheus is None else [_part_row("prometheus", state.prometheus)]
    rows += [] if state.ui is None else [_part_row("ui", state.ui)]
    rows += [_replica_row(replica) for replica in (*state.replicas, *state.upstreams)]
    lines.append(table(rows, ("PART", "STATE", "PID", "RESTARTS", "")))
    for replica in state.replicas:
        lines += _node_lines(replica)
    starts = _starts(run, now)
    if starts:
        lines += ["", "starts, newest first:", table(starts, indent=2)]
    reasons = _reasons(state, now)
    if reasons:
        lines += ["", "restarts, newest first:", table(reasons, indent=2)]
    if state.controller.state == "gone" and state.phase not in ("down", "failed", "stopping"):
        why = f" ({state.controller.note})" if state.controller.note else ""
        lines += ["", f"the controller is gone{why}: nothing is restarted until `{command_name()} up` starts it again"]
    return "\n".join([*lines, *_ended_outside(run, state)])


def _ended_outside(run: Run, state: State) -> list[str]:
    """How replicas that their owner ended in the target come back; an engine that failed says more itself."""
    names = [
        replica.replica for replica in state.replicas
        if replica.state == "failed" and (replica.announcement is None or replica.announcement.state != "failed")
    ]  # fmt: skip
    follows_load = state.scaling is not None and not state.scaling.is_pinned  # then it is tried again by itself
    if not names or follows_load or state.controller.state == "gone":
        return []
    command, n_left = f"{command_name()} scale {run.name}", len(state.replicas) - len(names)
    way = f"`{command} {n_left}`, then `{command} {len(state.replicas)}`, brings it back"
    if not n_left:
        way = f"`{command_name()} up` starts the deployment again"
    which = f"replica{'s' if len(names) > 1 else ''} {', '.join(names)}"
    return ["", f"{which} {'were' if len(names) > 1 else 'was'} ended from outside, and not by penstock: {way}"]


def _wakes(state: State) -> bool:
    """Whether a request starts a replica where there is none."""
    return state.scaling is not None and not state.scaling.is_pinned


def scaling_words(scaling: Scaling) -> str:
    """ "2 of 1..5: load 1.30 replicas", or "3 (pinned)"."""
    if scaling.is_pinned:
        return f"{scaling.replicas} (pinned)"
    words = f"{scaling.replicas} of {scaling.least}..{scaling.most}"
    words += f": {scaling.reason}" if scaling.reason else ""
    return words + (f"; {scaling.failure}" if scaling.failure else "")


def _sleeps(state: State) -> bool:
    states = {replica.state for replica in state.replicas}
    return "sleeping" in states and states <= {"sleeping", "failed"}


def _kv_cache_facts(plan: Plan, state: State) -> list[tuple[str, str]]:
    """For the replica whose engine is furthest from the plan, when the difference is large."""
    large = [gap for gap in observe.kv_cache_differences(plan, state).values() if gap.is_worth_saying]
    return [
        (
            "memory",
            f"{gap.measured_kv_gib:.2f} GiB of KV cache a GPU, planned {gap.planned_kv_gib:.2f} ({gap.share:+.1%})",
        )
        for gap in sorted(large, key=lambda gap: abs(gap.share))[-1:]
    ]


def _part_row(name: str, part: Part) -> tuple[str, str, str, str, str]:
    pid = str(part.process.pid) if part.process and part.state == "running" else "-"
    return name, part.state, pid, str(part.n_restarts), part.note or ""


def _child(part: Part) -> str:
    if part.url is None or part.state == "gone":
        return part.note or (f"restarting: {part.restarts[-1].reason}" if part.restarts else "starting")
    return part.url if part.note is None else f"{part.url} on {part.note}"


def _page(run: Run, part: Part) -> str:
    if part.unit is None:
        return _child(part)
    if part.state != "running" and part.note:
        return part.note
    if part.url is not None:
        return part.url
    _, page_url, login = live.shown(run)
    if login is not None and page_url is not None:
        return f"{page_url} behind {_short_login(login)}; here: {command_name()} ui {run.name}"
    return f"in its cluster; here: {command_name()} ui {run.name}"


def _address(run: Run) -> str:
    url, _, login = live.shown(run)
    if url is None:
        return "none yet: its gateway waits"
    if login is not None:
        return f"{url}/v1 behind {login}; here: {command_name()} tunnel {run.name}"
    needs_tunnel = run.public_url is None and _is_in_a_cluster(run)
    return f"{url}/v1" + (f" (in its cluster; here: {command_name()} tunnel {run.name})" if needs_tunnel else "")


def _short_login(login: str) -> str:
    """Without what programs send."""
    return login.partition(" (")[0]


def _is_in_a_cluster(run: Run) -> bool:
    return "tunnels" in targets.load(run.record().target).capabilities


def _replica_row(replica: ReplicaStatus) -> tuple[str, str, str, str, str]:
    node = replica.announcement
    pid = str(node.processes[0].pid) if node and node.processes else "-"
    words = [progress_text(replica) if replica.state not in ACTIVE else replica.reason or ""]
    if replica.state in ("starting", "loading") and node:
        words += [node.loading, node.carried]
    if replica.in_flight:
        words.append(f"{replica.in_flight} in flight")
    if replica.state in ACTIVE and node and node.url:
        words.append(node.url)
    if replica.state == "ready" and node and node.ready_after_s is not None:
        words.append(f"ready in {show_seconds(node.ready_after_s)}")
    if replica.ends_at is not None and replica.ends_at > time.time():
        words.append(_end_words(replica.ends_at, replica.ends_by))
    return f"replica {replica.replica}", replica.state, pid, str(replica.n_restarts), ", ".join(filter(None, words))


def _end_words(ends_at: float, ends_by: str | None) -> str:
    """ "its machines until Sat 19 Dec 14:30 (JOB_MAXIMUM_MINUTES=35000)"."""
    form = "%a %H:%M" if ends_at - time.time() < _WEEKDAY_S else "%a %d %b %H:%M"
    words = f"its machines until {time.strftime(form, time.localtime(ends_at))}"
    return words if ends_by is None else f"{words} ({ends_by})"


def _node_lines(replica: ReplicaStatus) -> list[str]:
    nodes = replica.announcement.nodes if replica.announcement else ()
    if not nodes:
        return []
    rows = []
    for node in nodes:
        address = f"{node.address} ({node.interface})" if node.address else "-"
        gpus, ranks = (",".join(map(str, numbers)) or "-" for numbers in (node.gpus, node.ranks))
        rows.append((f"{node.rank} {node.host}", node.state, address, gpus, ranks, node.reason or ""))
    head = ("NODE", "STATE", "ADDRESS", "GPUS", "RANKS", "")
    return ["", f"nodes of replica {replica.replica}:", table(rows, head, indent=2)]


def _starts(run: Run, now: float) -> list[tuple[str, str]]:
    """What each start of this launch took, by stage, also those of replicas that are gone."""
    since = run.record().created_at
    ready = [event for event in run.events(recent=True) if event.event == "replica ready" and event.at >= since]
    newest = sorted(ready, key=lambda event: event.at, reverse=True)[:_SHOWN_STARTS]
    return [
        (f"{show_seconds(max(0.0, now - event.at))} ago", f"replica {event.replica} {printable(event.text)}")
        for event in newest
    ]


def _reasons(state: State, now: float) -> list[tuple[str, str]]:
    parts: dict[str, Sequence[Restart]] = {
        "controller": state.controller.restarts,
        "gateway": state.gateway.restarts,
        "prometheus": () if state.prometheus is None else state.prometheus.restarts,
        "ui": () if state.ui is None else state.ui.restarts,
        **{f"replica {replica.replica}": replica.restarts for replica in state.replicas},
    }
    reasons = [(restart.at, part, restart.reason) for part, restarts in parts.items() for restart in restarts]
    newest = sorted(reasons, reverse=True)[:8]
    return [(f"{show_seconds(max(0.0, now - at))} ago", f"{part}: {reason}") for at, part, reason in newest]


def doctor_text(findings: Sequence[Finding]) -> str:
    """A row per finding, the nodes with the same finding together; below a problem, how to fix it."""
    signs = {"ok": "ok", "warning": "!!", "bad": "XX"}
    nodes: dict[Finding, list[str]] = {}
    for finding in findings:
        names = nodes.setdefault(dataclasses.replace(finding, node=None), [])
        names += [finding.node] if finding.node is not None else []
    rows: list[tuple[str, ...]] = []
    for finding, names in nodes.items():
        shown = names if len(names) <= 4 else [*names[:2], f"{len(names) - 2} more"]
        where = f"{', '.join(shown)}: " if names else ""
        rows.append((signs[finding.state], finding.check, f"{where}{finding.found}"))
        if finding.cure and finding.state != "ok":
            rows.append(("", "", f"fix: {finding.cure}"))
    n_bad = sum(finding.state == "bad" for finding in findings)
    last = "no problem found" if not n_bad else f"{n_bad} problem{'s' if n_bad > 1 else ''} to fix before `up`"
    return f"{table(rows)}\n{last}"
