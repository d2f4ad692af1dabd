"""The verbs that start, show, change and end deployments: up, render, ls, status, logs, scale, sleep, down, clean."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any, Literal

from penstock.cli import arguments
from penstock.cli.output import print_error, print_json, print_step, repeat, table
from penstock.errors import PenstockError, UserError

if TYPE_CHECKING:
    from penstock.run_folder import Run, State


def register_up(parser: argparse.ArgumentParser) -> None:
    arguments.add_deployment(parser)
    parser.add_argument(
        "--replace",
        action="store_true",
        help="end a running deployment of that name first; it starts again when this one does not",
    )
    parser.add_argument("--dry-run", action="store_true", help="print exactly what would be sent, and send nothing")
    parser.add_argument("-d", "--no-wait", action="store_true", help="return when the gateway listens")
    text = "stop waiting after this time; the deployment continues to start"
    parser.add_argument("--timeout", type=arguments.seconds, metavar="SECONDS", help=text)
    arguments.add_json(parser, "print one JSON event per line")
    examples = (
        "penstock up",
        "penstock up Qwen/Qwen3-0.6B --engine vllm --port 9000",
        "penstock up qwen.yaml --replicas 2 --set engine.max_model_len=8192",
        "penstock up Qwen/Qwen3-32B -tp 2 --max-model-len 8192 --kv-cache-dtype fp8",
    )
    parser.description = f"{parser.description} Flags of `vllm serve` are accepted too."
    arguments.complete(parser, _up, examples)


def register_run(parser: argparse.ArgumentParser) -> None:
    arguments.add_deployment(parser)
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="sent once; without it, a chat begins")
    parser.set_defaults(takes_rest="prompt")
    examples = ('penstock run penstock-demo "What is penstock?"', "penstock run Qwen/Qwen3-0.6B")
    arguments.complete(parser, _run, examples)


def register_render(parser: argparse.ArgumentParser) -> None:
    arguments.add_deployment(parser)
    arguments.add_json(parser)
    arguments.complete(parser, _render, ("penstock render qwen.yaml", "penstock render qwen.yaml --set target=slurm"))


def register_ls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-a", "--all", action="store_true", help="include deployments that ended or failed")
    arguments.add_watch(parser)
    arguments.add_json(parser)
    arguments.complete(parser, _ls, ("penstock ls", "penstock ls --all --json"))


def register_status(parser: argparse.ArgumentParser) -> None:
    arguments.add_name(parser)
    arguments.add_watch(parser)
    arguments.add_json(parser)
    arguments.complete(parser, _status, ("penstock status", "penstock status qwen --json", "penstock status --watch"))


def register_logs(parser: argparse.ArgumentParser) -> None:
    arguments.add_name(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="print new lines as they come")
    text = "the last N lines of each log"
    parser.add_argument("-n", "--lines", "--tail", type=arguments.count_or_zero, metavar="N", help=text)
    text = "lines of the last 90s, 10m, 2h or 1d"
    parser.add_argument("--since", type=arguments.period_s, metavar="TIME", help=text)
    parser.add_argument("--replica", metavar="N", help="one replica (default: all that live)")
    parser.add_argument("-a", "--all", dest="with_ended", action="store_true", help="also of replicas that ended")
    parts = ("replicas", "gateway", "controller", "prometheus", "ui", "events")
    parser.add_argument("--part", choices=parts, default="replicas", help="whose log (default: replicas)")
    examples = ("penstock logs --follow", "penstock logs qwen --replica 0 -n 100", "penstock logs qwen --part events")
    arguments.complete(parser, _logs, examples)


def register_scale(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="+", metavar="[NAME] N|auto", help="the deployment, and how many replicas")
    parser.add_argument("--no-wait", action="store_true", help="return at once")
    arguments.add_json(parser)
    arguments.complete(
        parser, _scale, ("penstock scale 3", "penstock scale qwen 0 --no-wait", "penstock scale qwen auto")
    )


def register_down(parser: argparse.ArgumentParser) -> None:
    arguments.add_name(parser)
    parser.add_argument("--now", action="store_true", help="do not wait for requests in flight")
    parser.add_argument("-a", "--all", action="store_true", help="end every deployment")
    parser.add_argument("--forget", action="store_true", help="give up what is on machines that are gone for good")
    text = "also remove the weights that its target keeps for the next start"
    parser.add_argument("--weights", action="store_true", help=text)
    arguments.add_json(parser)
    arguments.complete(parser, _down, ("penstock down", "penstock down qwen --now", "penstock down --all"))


def register_clean(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="remove what was found")
    text = "include the folders (logs, plans) of ended deployments, without keys and usage"
    parser.add_argument("--runs", action="store_true", help=text)
    parser.add_argument("--keys", metavar="NAME", help="include the keys and the usage of this ended deployment")
    arguments.add_json(parser)
    examples = tuple(f"penstock clean{more}" for more in ("", " --yes", " --runs --yes", " --keys NAME --yes"))
    arguments.complete(parser, _clean, examples)


def register_sleep(parser: argparse.ArgumentParser) -> None:
    _add_order(parser, "sleep", "qwen --json")


def register_wake(parser: argparse.ArgumentParser) -> None:
    _add_order(parser, "wake", "qwen --no-wait")


def _add_order(parser: argparse.ArgumentParser, word: Literal["sleep", "wake"], example: str) -> None:
    arguments.add_name(parser)
    parser.add_argument("--no-wait", action="store_true", help="return at once")
    text = f"stop waiting after this time; the order to {word} stays"
    parser.add_argument("--timeout", type=arguments.seconds, metavar="SECONDS", help=text)
    arguments.add_json(parser, "print one JSON event per line")
    examples = (f"penstock {word}", f"penstock {word} {example}")
    arguments.complete(parser, lambda options: _order(options, word), examples)


def _up(options: argparse.Namespace) -> int:
    from penstock import run_folder
    from penstock.cli import progress, status_text
    from penstock.cli.fetch import FetchDisplay
    from penstock.deployment import live, measured, prepare, replace, start

    deployment = arguments.deployment_of(options)
    if options.dry_run:
        return _print_prepared(prepare.rehearse(deployment), options.json)
    started: start.Started | None = None
    try:
        with FetchDisplay(sys.stderr, options.json, "fetch") as bar:
            fetching = prepare.Fetching(bar.show, print_step)
            started = start.up(deployment, options.replace, lambda step: print_step(f"\n{step}"), fetching)
        run = run_folder.find(started.name)
        if options.json:
            facts = {"name": started.name, "url": started.url, "was_running": started.was_running, "key": started.key}
            print_json({"event": "submitted", **facts, "warnings": run.plan().warnings})
        elif options.no_wait or options.timeout is not None:
            print(status_text.submitted_text(started, run))
        if not options.json and not started.was_running:
            for warning in run.plan().warnings:
                print(f"warning: {warning}", file=sys.stderr)
            expected = measured.expected(measured.start_key(run.plan()))
            if expected is not None:
                print(f"{started.name} {measured.show_start(expected)}")
        if options.no_wait:
            start.wait_listening(run)
            return 0
        with progress.StartDisplay(sys.stdout, options.json) as display:
            state = start.wait_ready(run, display.show, options.timeout, started.is_alone)
    except KeyboardInterrupt:
        if started is not None and started.is_alone:
            replace.undo(run_folder.find(started.name), lambda step: print_step(f"\n{step}"))
        raise
    if options.json:
        shown = live.shown(run)
        facts = {"name": started.name, "url": shown.url, "login": shown.login, "key": started.key}
        print_json({"event": "ready", **facts})
    else:
        print(status_text.ready_text(run, state, started))
    return 0


def _run(options: argparse.Namespace) -> int:
    from penstock.cli import main, remote

    name = arguments.deployment_of(options).name
    defaults = {"verb_name": "up", "replace": False, "dry_run": False, "no_wait": False, "timeout": None, "json": False}
    start = argparse.Namespace(**(vars(options) | defaults))
    with contextlib.redirect_stdout(sys.stderr):  # standard output is for the answer alone
        code = remote.forward(start, ())
        code = _up(start) if code is None else code
    prompt = ["--message", " ".join(options.prompt)] if options.prompt else []
    return code or main.run(["chat", name, *prompt])


def _render(options: argparse.Namespace) -> int:
    from penstock.deployment import prepare

    return _print_prepared(prepare.rehearse(arguments.deployment_of(options)), options.json)


def _print_prepared(prepared: Any, as_json: bool) -> int:
    import msgspec

    from penstock.cli import status_text

    if as_json:
        print_json(msgspec.to_builtins(prepared))
    elif prepared.artifact.document is not None:  # alone: the next program in the pipe reads it
        for warning in prepared.plan.warnings:
            print_step(f"warning: {warning}")
        print(prepared.artifact.files[prepared.artifact.document], end="")
    else:
        print(status_text.prepared_text(prepared))
    return 0


def _ls(options: argparse.Namespace) -> int:
    from penstock import run_folder
    from penstock.cli import status_text
    from penstock.deployment import observe

    if options.watch:
        return repeat(options, _ls)
    rows = [(run, observe.now_state(run, time.time())) for run in run_folder.every()]
    shown = [(run, state) for run, state in rows if options.all or not run.is_ended()]
    damage = {run.path: facts for run, state in shown if (facts := _damage(run, state)) is not None}
    if options.json:
        print_json([damage.get(run.path) or _facts(run, state) for run, state in shown])
    elif shown:
        whole = [(run, state) for run, state in shown if run.path not in damage]
        parts = [status_text.list_text(whole)] if whole else []
        if damage:
            parts.append(table([(facts["name"], facts["phase"], facts["reason"]) for facts in damage.values()]))
        print("\n".join(parts))
    else:
        hidden = f" ({len(rows)} ended: penstock ls -a)" if rows else ""
        print(f"no deployment runs{hidden}; start one: penstock up")
    return 0


def _damage(run: Run, state: State) -> dict[str, Any] | None:
    """What `ls` shows for a run whose folder cannot be read; None when it can."""
    try:
        _facts(run, state)
    except PenstockError as error:
        return {"name": run.name, "phase": "damaged", "reason": error.message, "folder": str(run.path)}
    return None


def _facts(run: Run, state: State) -> dict[str, Any]:
    import msgspec

    from penstock.deployment import live, observe

    deployment, plan, shown = run.deployment(), run.plan(), live.shown(run)
    return {
        "name": run.name,
        "url": shown.url,
        "login": shown.login,
        "auth": deployment.gateway.auth,
        "model": deployment.model,
        "target": deployment.target,
        "engine": plan.engine,
        "engine_version": plan.engine_version,
        "folder": str(run.path),
        "cost_usd": observe.cost_usd(run),
        "kv_cache": msgspec.to_builtins(observe.kv_cache_differences(plan, state)),
        **msgspec.to_builtins(state),
    }


def _status(options: argparse.Namespace) -> int:
    from penstock import run_folder
    from penstock.cli import status_text
    from penstock.deployment import observe

    if options.watch:
        return repeat(options, _status)
    run = run_folder.choose(options.name)
    state = observe.now_state(run, time.time())
    if options.json:
        print_json(_facts(run, state))
    else:
        print(status_text.status_text(run, state, time.time()))
    return 0


def _logs(options: argparse.Namespace) -> int:
    from penstock import run_folder
    from penstock.deployment import logs

    run = run_folder.choose(options.name)
    since = None if options.since is None else time.time() - options.since
    wanted = logs.Selection(options.replica, options.lines, options.follow, since, options.with_ended)
    for line in logs.lines(run, options.part, wanted):
        print(line, flush=options.follow)
    return 0


def _scale(options: argparse.Namespace) -> int:
    from penstock import run_folder
    from penstock.cli import progress
    from penstock.deployment import orders

    *names, number = options.words
    if number == "auto" and len(names) <= 1:
        return _scale_by_load(run_folder.choose(names[0] if names else None), options.json)
    if len(names) > 1 or not (number.isascii() and number.isdigit() and len(number) <= 4):
        hint = "penstock scale [NAME] N, with N a number of replicas, or auto"
        raise UserError(f'cannot scale to "{arguments.shortened(number)}"', hint=hint)
    run, n_replicas = run_folder.choose(names[0] if names else None), int(number)
    orders.scale(run, n_replicas)
    if not options.no_wait:
        with progress.StartDisplay(sys.stdout, options.json) as display:
            orders.wait_scaled(run, n_replicas, display.show)
    if options.json:
        print_json({"event": "scaled", "name": run.name, "replicas": n_replicas})
    else:
        print(f"{run.name} has {n_replicas} replica{'s' if n_replicas != 1 else ''}")
    return 0


def _scale_by_load(run: Run, is_json: bool) -> int:
    from penstock.deployment import orders

    orders.scale(run, None)
    least, most = run.deployment().replicas.min, run.deployment().replicas.max
    if is_json:
        print_json({"event": "scaled", "name": run.name, "replicas": "auto", "min": least, "max": most})
    else:
        print(f"{run.name} follows its load: {least} to {most} replicas")
    return 0


def _down(options: argparse.Namespace) -> int:
    from penstock import run_folder
    from penstock.deployment import stop

    if options.all and options.name is not None:
        name = arguments.shortened(options.name)
        raise UserError(f'cannot end "{name}" and every deployment at once', hint="Give a name, or --all.")
    chosen = run_folder.living() if options.all else [run_folder.choose(options.name)]
    if not chosen:
        print("[]" if options.json else "nothing runs")
    code = 0
    for run in chosen:
        on_step = None if options.json else lambda step, name=run.name: print(f"{name}: {step}", flush=True)
        try:
            swept = stop.down(run, options.now, on_step, options.forget, options.weights)
        except PenstockError as error:
            if not options.all:
                raise
            code = print_error(error, options.json)  # the others are still to be ended
            continue
        if options.json:
            print_json({"event": "down", "name": run.name, "swept": [process.pid for process in swept]})
        else:
            print(f"{run.name} is down")
    return code


def _clean(options: argparse.Namespace) -> int:
    import msgspec

    from penstock.deployment import leftovers

    items = leftovers.leftovers(options.runs, options.keys)
    for message in items.silent:
        print_step(f"warning: {message}")
    stuck = leftovers.clean(items.found) if options.yes else []
    if options.json:
        facts = msgspec.to_builtins({"found": items.found, "unknown": items.unknown, "stuck": stuck})
        print_json(facts | {"removed": options.yes})
    else:
        rows = [(item.kind, item.name, item.what) for item in items.found]
        rows += [("unknown", item.name, f"{item.what} (its run folder cannot be seen)") for item in items.unknown]
        print(table(rows) if rows else "nothing is left behind")
        if items.unknown:
            print("what is unknown may be in use: is its home mounted here? It is left alone")
        if items.found and not stuck:
            words = ["penstock clean", *["--runs"] * options.runs, *(["--keys", options.keys] if options.keys else [])]
            print("removed" if options.yes else f"run `{' '.join(words)} --yes` to remove these")
    if stuck:
        raise PenstockError("could not remove everything", detail="\n".join(item.name for item in stuck))
    return 0


def _order(options: argparse.Namespace, word: Literal["sleep", "wake"]) -> int:
    from penstock import run_folder
    from penstock.cli import progress
    from penstock.deployment import orders

    run = run_folder.choose(options.name)
    asked = orders.order(run, word)
    if not options.no_wait:
        with progress.StartDisplay(sys.stdout, options.json) as display:
            orders.wait_ordered(run, word, asked, display.show, options.timeout)
    done = {"sleep": "asleep", "wake": "awake"}[word] if not options.no_wait else f"ordered to {word}"
    if options.json:
        print_json({"event": done, "name": run.name})
    else:
        print(f"{run.name} is {done}" + ("; a request wakes it" if done == "asleep" else ""))
    return 0
