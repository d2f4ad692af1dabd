"""The command tree. Only this module (and `chat`) prints, and only this module exits.

Verbs import what they need when they run: `penstock --help` imports argparse and the error family.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from penstock import __version__
from penstock.cli import doctor, gateway, keys, remote
from penstock.cli import plan as cli_plan
from penstock.cli.bench import arguments
from penstock.errors import EXIT_OURS, PenstockError, UserError
from penstock.text import printable

if TYPE_CHECKING:
    from penstock.run_folder import Run, State
    from penstock.spec.deployment import Deployment

_EPILOG = "Documentation: docs/ in the repository. Errors exit with 2 when you can mend them, 1 when the fault is ours."


class _UsageError(UserError):
    """What argparse refuses, with its line of usage."""

    def __init__(self, message: str, usage: str) -> None:
        super().__init__(message)
        self.usage = usage


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print and exit: with --json, a program reads why."""

    def error(self, message: str) -> NoReturn:
        raise _UsageError(message, self.format_usage())


def main(argv: Sequence[str] | None = None) -> None:
    """The console script: run one verb and exit."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that what must be ended is ended
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Run one verb; the exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started us: penstock status >&-
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - for as long as we live
    as_json = "--json" in argv
    try:
        options = parser().parse_args(argv)
        if not hasattr(options, "verb"):
            parser().print_help()
            return 0
        code = remote.forward(options, argv, _deployment)
        code = options.verb(options) if code is None else code
        sys.stdout.flush()
        return int(code or 0)
    except _UsageError as error:
        if not as_json:
            print(error.usage, end="", file=sys.stderr)
        return _show_error(error, as_json)
    except PenstockError as error:
        return _show_error(error, as_json)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `penstock logs | head`
        return 0
    except Exception as error:  # noqa: BLE001 - the last line of defence: a user never sees a traceback
        return _show_bug(error, as_json)
    finally:
        _let_go_of_output()


def _let_go_of_output() -> None:
    """Drop what cannot be written (a closed pipe, a full disk): Python would try it again at its end, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_error(error: PenstockError, as_json: bool) -> int:
    with contextlib.suppress(OSError):  # nobody can be told
        _print_error(error, as_json)
    return error.exit_code


def _print_error(error: PenstockError, as_json: bool) -> None:
    if as_json:
        print(json.dumps(error.facts()), flush=True)
        return
    bold, plain = ("\033[1;31m", "\033[0m") if _has_colour(sys.stderr) else ("", "")
    print(f"{bold}error:{plain} {printable(error.message)}", file=sys.stderr)
    if error.detail:
        print(_indented("detail", printable(error.detail)), file=sys.stderr)
    if error.hint:
        print(_indented("hint", printable(error.hint)), file=sys.stderr)


def _show_bug(error: Exception, as_json: bool) -> int:
    if os.environ.get("PENSTOCK_TRACEBACK"):
        raise error
    bug = PenstockError(
        f"penstock failed: {type(error).__name__}: {error}",
        detail="This is a fault of penstock, not yours.",
        hint="Set PENSTOCK_TRACEBACK=1, run it again, and report what it prints.",
    )
    _show_error(bug, as_json)
    return EXIT_OURS


def _indented(word: str, text: str) -> str:
    lines = text.splitlines()
    if len(lines) == 1:
        return f"  {word}: {text}"
    return f"  {word}:\n" + "\n".join(f"    {line}" for line in lines)


def _has_colour(stream: Any) -> bool:
    return bool(stream.isatty()) and "NO_COLOR" not in os.environ


def parser() -> argparse.ArgumentParser:
    """The whole command tree; docs/reference/cli.md is generated from it."""
    root = _Parser(
        prog="penstock",
        description="One file and one command take any open LLM from a laptop to a cluster, on vLLM and Ray.",
        epilog=_EPILOG,
    )
    root.add_argument("--version", action="version", version=f"penstock {__version__}")
    verbs = root.add_subparsers(title="verbs", metavar="VERB")

    def verb(name: str, action: Callable[[argparse.Namespace], int | None], text: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        sub.set_defaults(verb=action, verb_name=name)
        return sub

    up = verb("up", _up, "start a deployment and wait until it answers; without FILE, the bundled demo")
    _add_deployment(up)
    up.add_argument(
        "--replace", action="store_true", help="end a deployment of that name that runs with other settings"
    )
    up.add_argument("--dry-run", action="store_true", help="print exactly what would be sent, and send nothing")
    up.add_argument("--no-wait", action="store_true", help="return when everything is submitted")
    up.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="stop waiting after this time (it goes on)")
    _add_json(up, "print one JSON event a line")
    plan = verb("plan", _plan, "say before the launch what fits, how to cut it and how fast it will be")
    cli_plan.add_arguments(plan)
    render = verb("render", _render, "print exactly what `up` would send, and send nothing")
    _add_deployment(render)
    _add_json(render)
    ls = verb("ls", _ls, "list deployments")
    ls.add_argument("-a", "--all", action="store_true", help="ended and failed ones too")
    _add_json(ls)
    status = verb("status", _status, "show a deployment: its parts, replicas, restarts and their reasons")
    _add_name(status)
    _add_json(status)
    _add_logs(verb("logs", _logs, "print the log of a deployment's replicas, gateway or controller"))
    _add_chat(verb("chat", _chat, "talk to a deployment in the terminal"))
    tunnel = verb("tunnel", remote.tunnel, "open an address here that leads to a deployment on a login node")
    remote.add_tunnel_arguments(tunnel)
    keys.add_keys_arguments(verb("keys", _keys, "make, list, rotate and revoke the keys of a gateway"))
    keys.add_usage_arguments(verb("usage", _usage, "show who used what, and what it cost"))
    scale = verb("scale", _scale, "change the number of replicas; those that go finish their requests first")
    scale.add_argument("words", nargs="+", metavar="[NAME] N", help="the deployment, and how many replicas")
    scale.add_argument("--no-wait", action="store_true", help="return at once")
    _add_json(scale)
    down = verb("down", _down, "end a deployment; requests in flight finish first")
    _add_name(down)
    down.add_argument("--now", action="store_true", help="do not wait for requests in flight")
    down.add_argument("-a", "--all", action="store_true", help="every deployment")
    _add_json(down)
    clean = verb("clean", _clean, "find what ended deployments left behind; removes nothing without --yes")
    clean.add_argument("--yes", action="store_true", help="remove what was found")
    clean.add_argument("--runs", action="store_true", help="the folders (logs, plans) of ended deployments too")
    _add_json(clean)
    gateway.add_arguments(verb("gateway", gateway.run, "serve engines that already run, on one address"))
    bench = verb("bench", arguments.run_compare, "measure an endpoint or an engine, and compare what was measured")
    arguments.add_arguments(bench, _deployment)
    what = "why a deployment would not start: this machine, or with FILE its nodes; all reasons at once"
    doctor.add_arguments(verb("doctor", _doctor, what))
    return root


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f'"{text[:20]}" is not a number of seconds above 0')
    return value


def _whole_number(text: str) -> int:
    if not _is_whole_number(text.removeprefix("-"), 9):
        raise argparse.ArgumentTypeError(f'"{text[:20]}" is not a whole number of at most 9 digits')
    return int(text)


def _count(text: str) -> int:
    if not _is_whole_number(text, 9):
        raise argparse.ArgumentTypeError(f'"{text[:20]}" is not a whole number from 0 to 999999999')
    return int(text)


def _is_whole_number(text: str, n_digits_max: int) -> bool:
    """Whether `int` reads it, and nobody has to compute with thousands of digits."""
    return text.isascii() and text.isdigit() and len(text) <= n_digits_max


def _not_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return text


def _add_json(sub: argparse.ArgumentParser, text: str = "print JSON") -> None:
    sub.add_argument("--json", action="store_true", help=text)


def _add_name(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("name", nargs="?", metavar="NAME", help="the deployment; may be left out when only one runs")


def _add_deployment(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("source", nargs="?", metavar="FILE|MODEL", help="a YAML file, a model folder or a hub id")
    sub.add_argument("--name", type=_not_empty, help="the deployment's name (default: from the model)")
    sub.add_argument("--engine", choices=("auto", "vllm", "llamacpp"), help="same as --set engine.kind=...")
    sub.add_argument("--replicas", type=_whole_number, metavar="N", help="same as --set replicas=N")
    sub.add_argument(
        "--port", type=_whole_number, metavar="PORT", help="same as --set gateway.port=...; 0 takes any free port"
    )
    sub.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a field of the file")


def _add_logs(sub: argparse.ArgumentParser) -> None:
    _add_name(sub)
    sub.add_argument("-f", "--follow", action="store_true", help="go on as lines come")
    sub.add_argument("-n", "--lines", type=_count, metavar="N", help="only the last N lines of each")
    sub.add_argument("--replica", metavar="N", help="one replica (default: all)")
    sub.add_argument("--part", choices=("replicas", "gateway", "controller", "events"), default="replicas")


def _add_chat(sub: argparse.ArgumentParser) -> None:
    _add_name(sub)
    sub.add_argument("-m", "--message", metavar="TEXT", help="send one message, print the answer, leave")
    sub.add_argument("--system", metavar="TEXT", help="a system message")
    sub.add_argument("--model", help="a model name, when the address serves several")
    sub.add_argument("--url", help="any OpenAI-compatible address instead of a deployment ($OPENAI_BASE_URL)")
    sub.add_argument("--max-tokens", type=int, metavar="N")
    sub.add_argument("--temperature", type=float, metavar="T")
    sub.add_argument("--completion", action="store_true", help="send plain prompts to /v1/completions")
    _add_json(sub, "print one JSON an answer")


def _deployment(options: argparse.Namespace) -> Deployment:
    """The deployment that FILE|MODEL and the flags describe; the bundled demo when there is none."""
    from penstock.spec import reading
    from penstock.spec.deployment import DEMO_MODEL

    # As JSON, which YAML reads the same way: a name such as 123 stays text.
    settings = [f"{key}={json.dumps(value)}" for key, value in _flag_settings(options) if value is not None]
    settings += options.set
    source = options.source
    if source is None:
        return _demo(settings)
    path = Path(source)
    try:
        is_yaml = path.suffix in (".yaml", ".yml") or (path.is_file() and path.suffix != ".gguf")
    except (OSError, ValueError) as exc:
        why = getattr(exc, "strerror", None) or str(exc)
        raise UserError(f'could not look at "{_shortened(source)}": {why}', hint="Check the path.") from exc
    if is_yaml:
        return reading.load(path, settings)
    # A path is the same model from everywhere: `up` compares files by their values.
    is_path = source != DEMO_MODEL and (path.is_dir() or path.is_file())
    model = str(path.resolve()) if is_path else source
    return reading.from_mapping({"model": model}, f'model "{source}"', settings)


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."


def _flag_settings(options: argparse.Namespace) -> list[tuple[str, object]]:
    fields = {"name": "name", "engine": "engine.kind", "replicas": "replicas", "port": "gateway.port"}
    return [(field, getattr(options, flag, None)) for flag, field in fields.items()]


def _demo(settings: list[str]) -> Deployment:
    """The bundled demo. Nobody chose its port, so a taken one is no error: any free one will do."""
    from penstock import paths, run_folder
    from penstock.hardware import network
    from penstock.spec import reading
    from penstock.spec.deployment import DEMO_MODEL

    deployment = reading.from_mapping({"model": DEMO_MODEL}, "the demo", settings)
    if any(setting.startswith("gateway.port=") for setting in settings):
        return deployment
    existing = run_folder.Run(paths.home() / "runs" / deployment.name)
    if existing.exists() and not existing.is_ended():
        port = existing.deployment().gateway.port
    else:
        try:
            network.check_port(deployment.gateway.host, deployment.gateway.port)
            return deployment
        except UserError:
            port = 0
    return reading.from_mapping({"model": DEMO_MODEL}, "the demo", [*settings, f"gateway.port={port}"])


def _emit(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def _up(options: argparse.Namespace) -> int:
    from penstock import run_folder
    from penstock.cli import progress, status_text
    from penstock.deployment import prepare, start

    deployment = _deployment(options)
    if options.dry_run:
        return _print_prepared(prepare.rehearse(deployment), options.json)
    before = _launch_id(deployment.name)
    try:
        started = start.up(deployment, options.replace, lambda step: print(f"\n{step}", file=sys.stderr))
        found = run_folder.find(started.name)
        if options.json:
            facts = {"name": started.name, "url": started.url, "was_running": started.was_running, "key": started.key}
            _emit({"event": "submitted", **facts, "warnings": found.plan().warnings})
        elif options.no_wait or options.timeout is not None:
            print(status_text.submitted_text(started))
        if not options.json and not started.was_running:
            for warning in found.plan().warnings:
                print(f"warning: {warning}", file=sys.stderr)
        if options.no_wait:
            return 0
        with progress.StartDisplay(sys.stdout, options.json) as display:
            state = start.wait_ready(found, display.show, options.timeout, is_ours=not started.was_running)
    except KeyboardInterrupt:
        with start.ctrl_c_ignored():
            if _launch_id(deployment.name) != before:  # a second `up` does not end what ran before it
                _undo(deployment.name)
        raise
    if options.json:
        _emit({"event": "ready", "name": started.name, "url": found.url, "key": started.key})
    else:
        print(status_text.ready_text(found, state, started))
    return 0


def _launch_id(name: str) -> str | None:
    from penstock import paths, run_folder

    run = run_folder.Run(paths.home() / "runs" / name)
    try:
        return run.record().id
    except PenstockError:  # there is none, or its folder is damaged: `up` tells
        return None


def _undo(name: str) -> None:
    from penstock import paths, run_folder
    from penstock.deployment import stop

    run = run_folder.Run(paths.home() / "runs" / name)
    if run.exists() and not run.is_ended():
        print(f"\nending {name} ...", file=sys.stderr)
        stop.down(run, now=True)


def _plan(options: argparse.Namespace) -> int:
    return cli_plan.run(options)


def _keys(options: argparse.Namespace) -> int:
    return keys.run_keys(options)


def _usage(options: argparse.Namespace) -> int:
    return keys.run_usage(options)


def _render(options: argparse.Namespace) -> int:
    from penstock.deployment import prepare

    return _print_prepared(prepare.rehearse(_deployment(options)), options.json)


def _print_prepared(prepared: Any, as_json: bool) -> int:
    import msgspec

    from penstock.cli import status_text

    if as_json:
        _emit(msgspec.to_builtins(prepared))
    else:
        print(status_text.prepared_text(prepared))
    return 0


def _ls(options: argparse.Namespace) -> int:
    import time

    from penstock import run_folder
    from penstock.cli import status_text
    from penstock.deployment import observe

    rows = [(run, observe.now_state(run, time.time())) for run in run_folder.every()]
    shown = [(run, state) for run, state in rows if options.all or not run.is_ended()]
    damage = {run.path: found for run, state in shown if (found := _damage(run, state)) is not None}
    if options.json:
        print(json.dumps([damage.get(run.path) or _facts(run, state) for run, state in shown]))
    elif shown:
        whole = [(run, state) for run, state in shown if run.path not in damage]
        parts = [status_text.list_text(whole)] if whole else []
        if damage:
            parts.append(
                status_text.table([(facts["name"], facts["phase"], facts["reason"]) for facts in damage.values()])
            )
        print("\n".join(parts))
    else:
        hidden = f" ({len(rows)} ended: penstock ls -a)" if rows else ""
        print(f"no deployment runs{hidden}; start one: penstock up")
    return 0


def _damage(run: Run, state: State) -> dict[str, Any] | None:
    """What `ls` tells of a run whose folder cannot be read; None when it can."""
    try:
        _facts(run, state)
    except PenstockError as error:
        return {"name": run.name, "phase": "damaged", "reason": error.message, "folder": str(run.path)}
    return None


def _facts(run: Run, state: State) -> dict[str, Any]:
    import msgspec

    from penstock.deployment import observe

    deployment, plan = run.deployment(), run.plan()
    return {
        "name": run.name,
        "url": run.known_url,
        "model": deployment.model,
        "target": deployment.target,
        "engine": plan.engine,
        "engine_version": plan.engine_version,
        "folder": str(run.path),
        "kv_cache": msgspec.to_builtins(observe.kv_cache_differences(plan, state)),
        **msgspec.to_builtins(state),
    }


def _status(options: argparse.Namespace) -> int:
    import time

    from penstock import run_folder
    from penstock.cli import status_text
    from penstock.deployment import observe

    found = run_folder.choose(options.name)
    state = observe.now_state(found, time.time())
    if options.json:
        _emit(_facts(found, state))
    else:
        print(status_text.status_text(found, state, time.time()))
    return 0


def _logs(options: argparse.Namespace) -> int:
    from penstock import run_folder
    from penstock.deployment import logs

    for line in logs.lines(
        run_folder.choose(options.name), options.part, options.replica, options.lines, options.follow
    ):
        print(line, flush=options.follow)
    return 0


def _chat(options: argparse.Namespace) -> int:
    from penstock import paths, run_folder
    from penstock.cli import chat
    from penstock.wire.client import Client

    url = options.url or (None if options.name else os.environ.get("OPENAI_BASE_URL"))
    if url is None:
        url = run_folder.choose(options.name).url
    client = Client(url.removesuffix("/").removesuffix("/v1"), api_key=os.environ.get("OPENAI_API_KEY"))
    settings = chat.ChatSettings(
        model=options.model,
        system=options.system,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        completion=options.completion,
        as_json=options.json,
        history_file=paths.home() / "chat-history",
    )
    return chat.chat(client, settings, once=options.message)


def _scale(options: argparse.Namespace) -> int:
    from penstock import run_folder
    from penstock.cli import progress
    from penstock.deployment import scale as deployment_scale
    from penstock.deployment import start

    *names, number = options.words
    if len(names) > 1 or not _is_whole_number(number, 4):
        raise UserError(
            f'cannot scale to "{_shortened(number)}"', hint="penstock scale [NAME] N, with N a number of replicas"
        )
    found, n_replicas = run_folder.choose(names[0] if names else None), int(number)
    deployment_scale.scale(found, n_replicas)
    if not options.no_wait:
        with progress.StartDisplay(sys.stdout, options.json) as display:
            state = start.watch(found, display.show, lambda state: deployment_scale.is_scaled(state, n_replicas))
        failed = next((replica for replica in state.replicas if replica.state == "failed"), None)
        if failed is not None:
            raise PenstockError(f"could not start replica {failed.replica}: {failed.reason}")
    if options.json:
        _emit({"event": "scaled", "name": found.name, "replicas": n_replicas})
    else:
        print(f"{found.name} has {n_replicas} replica{'s' if n_replicas != 1 else ''}")
    return 0


def _down(options: argparse.Namespace) -> int:
    from penstock import run_folder
    from penstock.deployment import stop

    if options.all and options.name is not None:
        raise UserError(
            f'cannot end "{_shortened(options.name)}" and every deployment at once', hint="Give a name, or --all."
        )
    chosen = run_folder.living() if options.all else [run_folder.choose(options.name)]
    if not chosen:
        print("[]" if options.json else "nothing runs")
    code = 0
    for found in chosen:
        on_step = None if options.json else lambda step, name=found.name: print(f"{name}: {step}", flush=True)
        try:
            swept = stop.down(found, options.now, on_step)
        except PenstockError as error:
            if not options.all:
                raise
            code = _show_error(error, options.json)  # the others are still to be ended
            continue
        if options.json:
            _emit({"event": "down", "name": found.name, "swept": [process.pid for process in swept]})
        else:
            print(f"{found.name} is down")
    return code


def _clean(options: argparse.Namespace) -> int:
    import msgspec

    from penstock.deployment import stop

    found = stop.leftovers(options.runs)
    stuck = stop.clean(found) if options.yes else []
    if options.json:
        _emit({"found": msgspec.to_builtins(found), "removed": options.yes, "stuck": msgspec.to_builtins(stuck)})
    elif not found:
        print("nothing is left behind")
    else:
        for item in found:
            print(f"{item.kind:8} {item.name}  {item.what}")
        print("removed" if options.yes and not stuck else "" if stuck else "run `penstock clean --yes` to remove these")
    if stuck:
        raise PenstockError("could not remove everything", detail="\n".join(item.name for item in stuck))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    return doctor.run(options, _deployment)


if __name__ == "__main__":
    main()
