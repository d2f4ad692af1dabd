"""The command line: every mistake is explained, ends with 2 and changes nothing. Nothing is started here."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from samples import NOW, cpu_machine, deployment, draft, end, gpu_machine, run_folder

from penstock import __version__, paths
from penstock import run_folder as runs
from penstock.cli import main, output
from penstock.deployment import prepare, replace
from penstock.engines.llamacpp.engine import LlamaCpp
from penstock.engines.vllm.engine import Vllm
from penstock.errors import PenstockError, UserError
from penstock.run_folder import Desired, Run
from penstock.targets import TABLE, load, local
from penstock.text import MIB

pytestmark = pytest.mark.loopback

VERBS = ["up", "render", "ls", "status", "logs", "chat", "keys", "usage", "scale", "down", "clean", "doctor"]
MISSING = Vllm.missing


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 16 GiB with both engines installed, and no setting of the developer's own."""
    monkeypatch.setattr(local, "this_machine", lambda _: cpu_machine())
    for engine in (LlamaCpp, Vllm):
        monkeypatch.setattr(engine, "missing", lambda self: None)
        monkeypatch.setattr(engine, "version", lambda self: "1.0")
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "PENSTOCK_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)


class Shell:
    """Runs a command in this process: its exit code, output and errors."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *words: str) -> tuple[int, str, str]:
        try:
            code = main.run(words)
        except SystemExit as exit_of_argparse:
            code = int(exit_of_argparse.code or 0)
        output, errors = self.capsys.readouterr()
        return code, output, errors


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        yield listener.getsockname()[1]


DEPLOYING = ["render", "up", "up --dry-run", "up --no-wait --replace"]

DEMO_DEPLOYMENT = 'deployment "penstock-demo": 1 problem'
# What is typed after `up` or `render`, and what the error begins with, its detail, its hint.
MISTAKES = (Path(__file__).parent / "golden" / "cli_mistakes.txt").read_text("utf-8").strip().split("\n\n")


def check_error(shell: Shell, words: list[str], message: str, hint: str = "", detail: str = "") -> None:
    code, output, errors = shell(*words)
    assert (code, output) == (2, "")
    assert errors.startswith(f"error: {message}") and "Traceback" not in errors, errors
    assert not detail or f"\n  detail: {detail}" in errors or f"\n    {detail}" in errors, errors
    assert not hint or f"\n  hint: {hint}" in errors, errors


@pytest.mark.parametrize("verb", DEPLOYING)
@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: case.partition("\n")[0])
def test_a_mistake_is_explained_and_changes_nothing(shell: Shell, home: Path, verb: str, case: str) -> None:
    words, message, *more = case.splitlines()
    free = [] if "nowhere.yaml" in words else ["--port", "0"]
    code, output, errors = shell(*verb.split(), *words.split(), *free)
    assert (code, output) == (2, "")
    assert errors.startswith(message), errors
    assert "Traceback" not in errors
    for line in more:
        kind, _, text = line.partition(": ")
        assert re.search(rf"\n  {kind}:\s+{re.escape(text)}", errors), errors
    # `up` takes its lock before it looks at the machine; nothing else may be there.
    left = [path.name for path in home.rglob("*") if path.is_file()]
    assert left in ([], [".penstock-demo.lock"], [".penstock-dem.lock"], [".nowhere.lock"])


@pytest.mark.parametrize("verb", DEPLOYING)
def test_a_port_in_use_is_explained(shell: Shell, home: Path, taken: int, verb: str) -> None:
    words = [*verb.split(), "--port", str(taken)]
    check_error(shell, words, f"cannot listen on 127.0.0.1:{taken}: address already in use", "End that", "Process ")
    observing = [*verb.split(), "--port", "0", "--set", "observe.prometheus=true", "--set", f"observe.port={taken}"]
    check_error(shell, observing, f"cannot listen on 127.0.0.1:{taken}", "End that", "Process ")
    assert not (home / "runs" / "penstock-demo").exists()


def test_all_that_is_wrong_is_reported_at_once(shell: Shell, taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`up` used to report one problem at a time, where `doctor` reports all."""
    run_folder(deployment(name="d"))
    monkeypatch.setattr("penstock.deployment.preflight.free_bytes", lambda _: 3 * MIB)
    monkeypatch.delitem(TABLE, "ray")
    load.cache_clear()
    words = ["--set", "target=ray", "--port", str(taken), "--name", "d"]
    code, _, errors = shell("up", "/models/absent", *words)
    assert (code, errors.splitlines()[0]) == (2, 'error: cannot use deployment "d": 5 problems')
    for problem in (
        'deployment "d" runs with other settings: model: penstock-demo -> /models/absent',
        'cannot use target "ray"',
        f"cannot listen on 127.0.0.1:{taken}: address already in use",
        "3.0 MiB of its disk are free: A deployment needs 64.0 MiB",
        'cannot use model "/models/absent": no such folder',
    ):
        assert problem in errors, errors
    words[1:2] = ["hardware.nodes=2", "--set", "engine.args.frob=1", "--engine", "llamacpp"]
    errors = shell("up", "/models/absent", *words)[2]
    assert "6 problems" in errors and "hardware.nodes: 2 nodes" in errors and "engine.args.frob" in errors


def test_an_absent_engine_is_explained(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Vllm, "missing", MISSING)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = "cannot start engine vllm: the package vllm is not installed in this Python"
    check_error(shell, ["render", "--port", "0", "--engine", "vllm"], message, "Install it: pip install vllm")


def test_a_model_in_a_form_the_engine_does_not_load_is_explained(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 1}')
    (tmp_path / "pytorch_model.bin").touch()
    message = f'cannot serve model "{tmp_path}" on engine vllm: no *.safetensors in "{tmp_path}"'
    words = ["render", "--engine", "vllm", "--port", "0", "--name", "m"]
    check_error(shell, [*words, str(tmp_path)], message, "Engine vllm loads safetensors.")
    path = tmp_path / "m.gguf"
    path.touch()
    message = f'cannot use model file "{path}": not a folder'
    check_error(shell, [*words, str(path)], message, "Use --engine llamacpp")

    def deny(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", deny)
    check_error(shell, ["render", "secret/m"], 'could not read "secret/m": Permission denied', "Check the")


@pytest.mark.parametrize("verb", ["status", "logs", "down", "chat", "scale"])
def test_a_deployment_is_named_or_the_only_one(shell: Shell, home: Path, verb: str) -> None:
    if verb != "scale":
        check_error(shell, [verb], "cannot choose a deployment: none runs", "Start one: penstock up.")
        assert not home.exists()
    for name in ("llama70", "b"):
        run_folder(deployment(name=name))
    words = [verb, "lama70", *(["2"] if verb == "scale" else [])]
    check_error(shell, words, 'cannot find deployment "lama70"', 'Did you mean "llama70"?')
    if verb != "scale":
        check_error(shell, [verb], "cannot choose a deployment: 2 run", "Name one of: b, llama70.")


def test_what_a_deployment_does_not_have_is_explained(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_folder()
    run.log("replica-0").write_text("hello\n")
    words = ["logs", "--replica", "7"]
    check_error(shell, words, 'cannot find replica "7" of "penstock-demo"', "It has: 0.")
    run.write_desired(Desired("down", 0))
    words = ["scale", "penstock-demo", "2"]
    check_error(shell, words, 'cannot scale deployment "penstock-demo": it is down', "penstock up penstock-demo")
    (tmp_path / "file").touch()
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "file"))
    message = f'cannot write run folder "{tmp_path / "file" / "runs"}": Not a directory'
    check_error(shell, ["up", "--port", "0"], message, "Set PENSTOCK_HOME to a folder you may write.")


@pytest.mark.parametrize(
    "words", ["frobnicate", "status --frobnicate", "up --timeout soon", "logs x y", "scale", "status --timeout=1"]
)
def test_a_usage_error_ends_with_2_and_is_an_object_with_json(shell: Shell, words: str) -> None:
    code, output, errors = shell(*words.split())
    assert (code, output) == (2, "")
    assert "usage: penstock" in errors and "error:" in errors
    code, output, errors = shell(*words.split(), "--json")
    assert (code, errors, json.loads(output)["error"]["exit_code"]) == (2, "", 2)


def test_an_error_as_json_goes_to_the_output_whole(shell: Shell) -> None:
    code, output, errors = shell("render", "--json", "--set", "engine.kidn=1")
    facts = json.loads(output)
    assert (code, errors, facts["error"]["message"]) == (2, "", "cannot use the demo: 1 problem")
    assert facts["problems"] == [{"path": "engine.kidn", "message": "unknown key", "hint": 'did you mean "kind"?'}]


ENDS: list[tuple[BaseException, int]] = [(PenstockError("could not"), 1), (KeyboardInterrupt(), 130)]
ENDS += [(BrokenPipeError(), 0), (ZeroDivisionError("division by zero"), 1)]


@pytest.mark.parametrize(("error", "code"), ENDS)
def test_every_other_end_has_its_code_and_a_fault_of_ours_no_traceback(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fail(deployment: object) -> None:
        raise error

    monkeypatch.setattr(prepare, "rehearse", fail)
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # a broken pipe closes the real standard output
    monkeypatch.setattr(sys.stdout, "fileno", lambda: 1)
    ended, _, errors = shell("render", "--port", "0")
    assert ended == code
    if isinstance(error, ZeroDivisionError):
        assert errors.startswith("error: penstock failed: ZeroDivisionError: division by zero\n")
        assert "PENSTOCK_TRACEBACK=1" in errors
        monkeypatch.setenv("PENSTOCK_TRACEBACK", "1")
        with pytest.raises(ZeroDivisionError):
            main.run(["render", "--port", "0"])


def test_the_bundled_model_renders_without_sending_anything(shell: Shell, home: Path) -> None:
    code, output, errors = shell("render", "--port", "0")
    assert (code, errors) == (0, "")
    head, _, rest = output.partition("# file artifact/launch.json\n")
    launch = json.loads(rest.partition("\n\n#")[0])
    assert "model: penstock-demo" in head
    assert "# the plan: llamacpp 1.0 on cpu, 1 rank(s) a replica, 1024 tokens a request" in head
    assert launch["plan"]["model"]["form"] == "gguf"
    assert launch["token_file"] == str(home / "runs" / "penstock-demo" / "secrets" / "admin-token")
    assert output.endswith("-m penstock.node '{run}/artifact/launch.json' --replica '{replica}'\n")
    assert not home.exists()


def rendered(shell: Shell, *words: str) -> Any:
    code, output, errors = shell(*words, "--json")
    assert (code, errors) == (0, "")
    return json.loads(output)


def test_a_dry_run_as_json_is_one_object(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for verb in (["render"], ["up", "--dry-run"]):
        facts = rendered(shell, *verb, "--port", "0", "--engine", "vllm", "--name", "x", "--replicas", "2")
        asked = facts["deployment"]["replicas"]
        assert (asked["min"], asked["max"], asked["metric"], asked["target"]) == (2, 2, "slo", None)
        assert (facts["plan"]["engine"], facts["plan"]["deployment"]) == ("vllm", "x")
        assert facts["plan"]["model"]["form"] == "safetensors"
    for suffix in (".yaml", ".yml", ".txt"):
        path = tmp_path / f"deployment{suffix}"
        path.write_text("model: penstock-demo\nname: from-file\nreplicas: 2\ngateway: {port: 0}\n")
        wanted = rendered(shell, "render", str(path), "--replicas", "3", "--set", "name=other")["deployment"]
        assert (wanted["name"], wanted["replicas"]["min"]) == ("other", 3)
    monkeypatch.setattr(local, "this_machine", lambda _: gpu_machine(2))
    plan = rendered(shell, "render", "--port", "0")["plan"]
    assert (plan["engine"], plan["device"]) == ("vllm", "cuda")


def test_a_port_that_is_taken_by_the_deployment_itself_or_not_chosen_is_no_problem(
    shell: Shell, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(host: str, port: int) -> None:
        if port:
            raise UserError("taken")

    with monkeypatch.context() as patch:
        patch.setattr("penstock.hardware.network.check_port", refuse)
        assert rendered(shell, "render")["deployment"]["gateway"]["port"] == 0, "the demo takes another"
    run = run_folder(deployment(gateway={"port": taken}))
    run.gateway_config.write_text(json.dumps({"listen": f"127.0.0.1:{taken}", "admin": "127.0.0.1:1"}))
    assert rendered(shell, "render")["deployment"]["gateway"]["port"] == taken


def test_lists_say_what_runs_or_that_there_is_nothing(shell: Shell) -> None:
    assert shell("ls") == (0, "no deployment runs; start one: penstock up\n", "")
    assert shell("ls", "--json") == (0, "[]\n", "")
    run = run_folder()
    for row in (rendered(shell, "status"), *rendered(shell, "ls")):
        assert (row["name"], row["url"], row["phase"]) == ("penstock-demo", "http://127.0.0.1:8000", "starting")
        assert (row["engine"], row["folder"]) == ("llamacpp", str(run.path))
    end(run)
    assert shell("ls")[1] == "no deployment runs (1 ended: penstock ls -a); start one: penstock up\n"
    assert shell("ls", "-a")[1].splitlines()[1].startswith("penstock-demo")


def test_logs_and_events_are_printed_as_lines(shell: Shell) -> None:
    run = run_folder()
    for name in ("0", "1"):
        run.log(f"replica-{name}").write_text(f"first of {name}\nlast of {name}\n")
    run.log("gateway").write_text("hello\n")
    run.add_event("scale", "1 -> 2 replicas", replica="1")
    assert shell("logs", "--replica", "1")[1] == "first of 1\nlast of 1\n"
    assert shell("logs", "-n", "1")[1] == "[0] last of 0\n[1] last of 1\n"
    assert shell("logs", "--part", "gateway")[1] == "hello\n"
    assert shell("logs", "--part", "controller")[1] == ""
    assert shell("logs", "--part", "events")[1].endswith(" scale [replica 1]: 1 -> 2 replicas\n")


@pytest.mark.processes
def test_doctor_ends_with_1_when_something_is_bad(shell: Shell, home: Path) -> None:
    code, output, _ = shell("doctor", "penstock-demo", "--set", "engine.max_model_len=4096", "--json")
    facts = json.loads(output)
    (last,) = [row for row in facts["findings"] if row["check"] == "deployment"]
    assert (code, facts["ok"], last["state"]) == (1, False, "bad")
    assert last["found"].startswith('cannot serve model "penstock-demo" with max_model_len 4096')
    assert not home.exists()


@pytest.fixture
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.processes.find_marked", lambda *_: [])


@pytest.mark.usefixtures("without_processes")
def test_clean_finds_nothing_or_shows_first(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert shell("clean") == (0, "nothing is left behind\n", "")
    paths.make_private(tmp_path / "penstock-0a1b2c-0", paths.home() / "runs" / "one")
    code, output, _ = shell("clean")
    assert (code, output.splitlines()[-1]) == (0, "run `penstock clean --yes` to remove these")
    assert (tmp_path / "penstock-0a1b2c-0").is_dir()
    assert shell("clean", "--yes")[1].splitlines()[-1] == "removed"
    assert not (tmp_path / "penstock-0a1b2c-0").exists()


def test_help_lists_and_explains_every_verb(shell: Shell) -> None:
    code, output, _ = shell("--help")
    assert code == 0
    listed = [line.split()[0] for line in output.splitlines() if line.startswith("    ") and line.strip()]
    assert [word for word in listed if word in VERBS] == VERBS
    assert shell() == (0, output, "")
    for verb in VERBS:
        code, output, _ = shell(verb, "--help")
        assert code == 0
        assert output.startswith(f"usage: penstock {verb}")
    assert shell("--version") == (0, f"penstock {__version__}\n", "")


@pytest.mark.processes
def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from penstock.cli import main; main.run([]); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    heavy = {"msgspec", "psutil", "yaml", "rich", "uvloop", "asyncio", "ray", "vllm", "torch", "xllamacpp", "numpy"}
    assert not loaded & heavy
    ours = {name.split(".")[1] for name in done.stdout.split() if name.startswith("penstock.")}
    assert ours <= {"cli", "errors", "text"}


def test_colour_is_for_terminals_that_want_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown() -> str:
        output.print_error(PenstockError("could not", detail="a\nb", hint="h"), as_json=False)
        return capsys.readouterr().err

    assert shown() == "error: could not\n  detail:\n    a\n    b\n  hint: h\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\033[1;31merror:\033[0m" in shown()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in shown()


def test_a_down_that_broke_off_is_seen_and_chosen(shell: Shell) -> None:
    """It used to be hidden, and `status` and `down` without a name chose another deployment."""
    run_folder(deployment(name="one")).write_desired(Desired("down", 0))
    end(run_folder(deployment(name="two")))
    assert [(row["name"], row["phase"]) for row in json.loads(shell("ls", "--json")[1])] == [("one", "stopping")]
    assert shell("status")[1].startswith("one is stopping")


@pytest.mark.parametrize("broken", ["plan.json", "run.json", "gateway.json", "spec.yaml", "state.json", "all"])
@pytest.mark.usefixtures("without_processes")
def test_a_damaged_folder_breaks_no_command_and_down_frees_its_name(shell: Shell, broken: str) -> None:
    run_folder(deployment(name="whole"))
    run = run_folder(deployment(name="old"))
    (run.path / ("plan.json" if broken == "all" else broken)).write_text("")
    code, output, errors = shell("ls")
    assert (code, errors) == (0, "") and "whole " in output
    rows = {row["name"]: row["phase"] for row in json.loads(shell("ls", "--json")[1])}
    assert rows["whole"] == "starting"
    if broken in ("plan.json", "gateway.json", "spec.yaml"):
        assert rows["old"] == "damaged"
        assert f'old  damaged  could not read "{run.path / broken}"' in output
        code, _, errors = shell("status", "old", "--json")
        assert (code, errors) == (1, "")
        assert shell("logs", "old")[0] == 0, "logs need none of these"
    if broken == "plan.json":
        code, _, errors = shell("status", "old")
        assert code == 1 and f'error: could not read "{run.path / broken}"' in errors
        assert "ends with: penstock down old" in errors
    for path in run.path.glob("*.*") if broken == "all" else []:
        path.write_text("{")
    assert shell("down", "old") == (0, "old: ending the controller\nold: ending the replicas\nold is down\n", "")
    assert run.is_ended()
    assert shell("up", "--name", "old", "--port", "0", "--dry-run")[0] == 0
    assert [row["name"] for row in json.loads(shell("ls", "--json")[1])] == ["whole"]
    assert runs.create(draft(deployment(name="old")), NOW).record().name == "old"


def test_down_of_all_takes_no_name_and_says_when_nothing_runs(shell: Shell) -> None:
    assert shell("down", "-a") == (0, "nothing runs\n", "")
    assert shell("down", "-a", "--json") == (0, "[]\n", "")
    run = run_folder(deployment(name="one"))
    check_error(shell, ["down", "-a", "one"], 'cannot end "one" and every deployment at once', "Give a name")
    assert run.desired().state == "up"


BAD_VALUES = [
    ("up --name=", "argument --name: it is empty"),
    *((f"up --timeout={text}", f'argument --timeout: "{text}" is not a number') for text in ("0", "-1", "inf", "nan")),
    ("up --timeout=soon", 'argument --timeout: "soon" is not a number of seconds above 0'),
    *((f"logs -n{text}", f'argument -n/--lines/--tail: "{text[:60]}" is not') for text in ("-1", "x", "²", "9" * 5000)),
    *((f"scale b {text}", f'cannot scale to "{text}"') for text in ("x", "1.5", "²")),
    ("scale a b 2", "cannot scale to"),
    ("scale b " + "9" * 5000, 'cannot scale to "9999'),
    ("status " + "a" * 5000, 'cannot find deployment "aaaa'),
    ("down b/../b", 'cannot find deployment "b/../b"'),
    ("render " + "a" * 5000, 'could not read "aaaa'),
]


@pytest.mark.parametrize(("words", "message"), BAD_VALUES, ids=[row[0][:20] for row in BAD_VALUES])
def test_a_value_out_of_range_is_explained(shell: Shell, words: str, message: str) -> None:
    run_folder(deployment(name="b"))
    code, output, errors = shell(*words.split(" "))
    assert (code, output) == (2, "")
    assert f"error: {message}" in errors
    assert len(errors) < 6000


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "code"),
    [
        *(("ls >&-", 0), ("ls --json >&-", 0), ("ls >&- 2>&-", 0), ("status x 2>&-", 2), ("--help >/dev/full", 0)),
        *(("ls >/dev/full", 1), ("ls --json >/dev/full", 1), ("status x --json >/dev/full", 2)),
        ("status x 2>/dev/full", 2),
    ],
)
def test_an_output_that_cannot_be_written_ends_without_a_traceback(words: str, code: int) -> None:
    command = f'"{sys.executable}" -m penstock.cli.main {words}'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_ctrl_c_at_a_clean_up_says_so_and_is_not_heard(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_folder(deployment(name="one"))
    ended = []

    def end_slowly(found: Run, **_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        ended.append(found.name)

    monkeypatch.setattr(replace, "end_run", end_slowly)
    before = signal.getsignal(signal.SIGINT)
    said: list[str] = []
    replace.undo(run, said.append)
    assert (ended, said) == (["one"], ["ending one ..."])
    assert signal.getsignal(signal.SIGINT) is before
    end(run)
    replace.undo(run)
    assert ended == ["one"], "what has ended is left alone"
