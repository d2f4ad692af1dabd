"""What other tools have taught people to type: other words for verbs, flags of `vllm serve`, completion, services."""

# ruff: noqa: F811 - fixtures of test_cli
from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from samples import deployment, run_folder
from store_rig import Store, row
from test_cli import DEMO_DEPLOYMENT, Shell, check_error, known_machine, shell  # noqa: F401 - fixtures

from penstock import __version__
from penstock.cli import main
from penstock.engines.vllm import serve_flags
from penstock.run_folder import Handle


@pytest.mark.parametrize(
    ("words", "usage", "hint"),
    [
        ("stauts", "usage: penstock [", 'Did you mean "status"?'),
        ("up --no-wiat", "usage: penstock up", "Did you mean --no-wait?"),
        ("status --jsno", "usage: penstock status", "Did you mean --json?"),
        ("logs --part gatway", "usage: penstock logs", 'Did you mean "gateway"?'),
        ("bench srve", "usage: penstock bench", 'Did you mean "serve"?'),
    ],
)
def test_a_mistyped_verb_or_flag_gets_the_nearest_and_the_usage_of_its_verb(
    shell: Shell, words: str, usage: str, hint: str
) -> None:
    code, output, errors = shell(*words.split())
    assert (code, output) == (2, "")
    assert errors.startswith(usage)
    assert f"hint: {hint}" in errors


@pytest.mark.loopback
def test_other_words_for_verbs(shell: Shell, tmp_path: Path) -> None:
    run_folder(deployment(name="one"))
    assert shell("ps")[1] == shell("ls")[1]
    assert shell("version")[1] == f"penstock {__version__}\n"
    assert shell("help", "up")[1] == shell("up", "--help")[1]
    assert shell("help")[1] == shell("--help")[1]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "m.safetensors").write_bytes(b"weights")
    for verb in ("pull", "fetch"):
        assert shell(verb, str(tmp_path))[:2] == (0, f"{tmp_path}\n")
    for words in ("bench", "bench serve", "autoscale", "autoscale explain", "up"):
        assert f"examples:\n  penstock {words}" in shell("help", *words.split())[1]
    for verb in ("stop", "rm"):
        assert shell(verb, "nobody")[2].splitlines()[0] == 'error: cannot find deployment "nobody"'


@pytest.mark.loopback
@pytest.mark.usefixtures("home")
def test_flags_of_vllm_serve_are_settings_and_a_file_may_be_given_as_with_other_tools(
    shell: Shell, tmp_path: Path
) -> None:
    (tmp_path / "d.yaml").write_text("model: penstock-demo\nname: from-file\ngateway: {port: 0}\n")
    words = ["render", "-f", str(tmp_path / "d.yaml"), "--json"]
    assert json.loads(shell(*words)[1])["deployment"]["name"] == "from-file"
    flags = "--port 0 -tp 2 penstock-demo --max-model-len 1K --enforce-eager --max-num-seqs=4 --host 127.0.0.1 -d"
    more = ["--compilation-config", '{"level": 3}', "--served-model-name", "x", "--set", "engine.args.max-num-seqs=5"]
    facts = json.loads(shell("up", "--dry-run", "--json", "--engine", "vllm", *flags.split(), *more)[1])
    wanted = facts["deployment"]
    assert (wanted["model"], wanted["parallel"]["tensor"]) == ("penstock-demo", 2)
    assert wanted["engine"]["max_model_len"] == 1024
    assert wanted["engine"]["args"] == {"enforce-eager": True, "max-num-seqs": 5, "compilation-config": '{"level": 3}'}
    assert wanted["gateway"]["aliases"] == ["x"]
    check_error(shell, ["render", "--api-key", "s"], "cannot use the demo", detail="engine.args.api-key")
    assert 'error: argument --max-model-len: "x" is not a whole number' in shell("up", "--max-model-len", "x")[2]


@pytest.mark.loopback
@pytest.mark.parametrize("words", ["status", "ls"])
def test_watching_shows_it_again_until_ctrl_c(shell: Shell, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    run_folder()
    n_left, sleep = [2], time.sleep

    def press(seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            sleep(seconds)  # a server of another test
        elif n_left[0] == 1:
            raise KeyboardInterrupt
        else:
            n_left[0] -= 1

    monkeypatch.setattr(time, "sleep", press)
    once = shell(words, "--json")[1]
    code, output, _ = shell(words, "--json", "--watch")
    assert (code, len(output.splitlines())) == (0, 2 * len(once.splitlines()))


@pytest.mark.processes
def test_a_shell_completes_every_verb_and_its_options(shell: Shell, tmp_path: Path) -> None:
    script = shell("completion", "bash")[1]
    path = tmp_path / "complete"
    (tmp_path / "runs" / "qwen").mkdir(parents=True)
    asked = {
        "bench ": ["serve", "compare", "report", "sweep", "throughput", "latency"],
        "bench serve --arrival ": ["poisson", "constant", "gamma", "ramp", "replay"],
        "bench serve --rat": ["--rate", "--rate-from"], "logs --fo": ["--follow"], "autoscale s": ["simulate"],
        "keys ro": ["rotate"], "rm --fo": ["--forget"], "ps --al": ["--all"], "stop q": ["qwen"], "scale q": ["qwen"],
        "help sta": ["status"], "up --engine l": ["llamacpp"], "completion f": ["fish"], "service ins": ["install"],
        "stat": ["status"], "sto": ["stop"],
    }  # fmt: skip
    empty = '""'
    lines = [
        f"COMP_WORDS=(penstock {words}{empty * words.endswith(' ')}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
        "_penstock; echo ${COMPREPLY[@]}"
        for words in asked
    ]
    path.write_text("\n".join([script, f"PENSTOCK_HOME={tmp_path}", *lines]))
    done = subprocess.run(["bash", str(path)], capture_output=True, text=True, check=True)
    assert dict(zip(asked, map(str.split, done.stdout.splitlines()), strict=True)) == asked
    assert "bashcompinit" in shell("completion", "zsh")[1]
    fish = shell("completion", "fish")[1]
    page = shell("help", "--man")[1]
    assert page.startswith('.TH PENSTOCK 1 "" "penstock')
    for verb in main.VERBS:
        assert f"-a {verb} -d" in fish and f".SH {verb.upper()}\n" in page


def test_a_service_is_a_unit_that_starts_and_ends_the_deployment(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    file = tmp_path / "d.yaml"
    file.write_text("model: penstock-demo\nname: chat\n")
    code, output, _ = shell("service", "install", str(file), "--replicas", "2", "--port", "9000")
    unit = tmp_path / "config" / "systemd" / "user" / "penstock-chat.service"
    assert code == 0
    assert f"wrote {unit}" in output and "systemctl --user enable --now penstock-chat.service" in output
    lines = unit.read_text().splitlines()
    flags = "--set replicas=2 --set gateway.port=9000"
    assert f"ExecStart={sys.executable} -m penstock.cli.main up {file} --set name=chat {flags}" in lines
    assert f"ExecStop={sys.executable} -m penstock.cli.main down chat" in lines
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "a b"))
    assert shell("service", "install", str(file), "--name", "chat")[0] == 0
    assert f'Environment="PENSTOCK_HOME={tmp_path / "a b"}"' in unit.read_text()
    assert unit.read_text().count("name=chat") == 1
    assert 'unknown action "remove"' in shell("service", "remove", str(file))[2]


def test_a_mistyped_flag_of_vllm_gets_the_nearest() -> None:
    assert serve_flags.meant("max-nums-seqs") == "max-num-seqs"
    assert serve_flags.meant("no-enable-prefix-cachng") == "enable-prefix-caching"
    for known in ("max-num-seqs", "max-num-seq", "no-enable-prefix-caching", "compilation-config.level", "a-new-one"):
        assert serve_flags.meant(known) is None


@pytest.mark.loopback
def test_logs_are_of_living_replicas_and_of_a_time(shell: Shell) -> None:
    run = run_folder()
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    for name in ("0", "1"):
        run.log(f"replica-{name}").write_text(f"1999-01-01T00:00:00Z old {name}\n  more\n{now} new {name}\n  more\n")
    run.write_handle(Handle("local", {"replica/1": {}}))
    assert [line.split()[-2:] for line in shell("logs", "--tail", "2")[1].splitlines()] == [["new", "1"], ["more"]]
    assert shell("logs", "--since", "10m")[1] == f"{now} new 1\n  more\n"
    local = time.strftime("%Y-%m-%d %H:%M:%S,000 gateway: new")
    run.log("gateway").write_text(f"1999-01-01 00:00:00,000 gateway: old\n{local}\n")
    assert shell("logs", "--since", "10m", "--part", "gateway")[1] == f"{local}\n"
    assert len(shell("logs", "--all")[1].splitlines()) == 8
    assert len(shell("logs", "--replica", "0")[1].splitlines()) == 4


@pytest.mark.loopback
def test_status_shows_the_cost_as_money(shell: Shell) -> None:
    run = run_folder(deployment(gateway={"price": {"input": 1, "output": 2}}))
    assert "  cost " not in shell("status")[1], "its store is not known"
    run.gateway_config.write_text(json.dumps({"listen": "h:1", "admin": "h:2", "store": str(run.store_file)}))
    store = Store(str(run.store_file))
    store.usage.add_rows("w", [row(number, cost_usd=0.21) for number in range(2)])
    store.close()
    assert "  cost      $0.42 for all requests so far\n" in shell("status")[1]
    assert json.loads(shell("status", "--json")[1])["cost_usd"] == pytest.approx(0.42)
