"""The deployment file: what is accepted, what is refused and in which words, and how it is written again."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_files import GOLDEN, cases

from penstock.errors import SpecError
from penstock.spec import gateway, reading
from penstock.spec.blocks import Slurm
from penstock.spec.deployment import Deployment, EngineSpec, GatewaySpec, Hardware, Parallel, Replicas, Workload

FULL = (GOLDEN / "every_block.yaml").read_text("utf-8")
ODD = "model: m\nengine: {args: {a: null, b: false, c: [1, x], d: []}, env: {A: '1'}}\ngateway: {aliases: [x, y]}"


def refused(text: str, *settings: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        reading.parse(text, settings=settings)
    return caught.value


def test_a_model_is_enough_and_the_rest_has_defaults() -> None:
    found = reading.parse("model: meta-llama/Llama-3.1-8B-Instruct")
    assert found == Deployment(model="meta-llama/Llama-3.1-8B-Instruct", name="llama-3-1-8b-instruct")
    assert (found.target, found.parallel, found.engine.kind, found.ui) == ("local", "auto", "auto", False)
    assert found.gateway == GatewaySpec(host="127.0.0.1", port=8000, auth="none", hold_s=60.0, drain_s=120.0)
    assert found.replicas == Replicas(1, 1)


def test_the_file_of_the_design_is_accepted_whole() -> None:
    found = reading.parse(FULL)
    assert found.hardware == Hardware("h100-sxm", 4, 2, "ib-ndr")
    assert found.workload == Workload(2000, 300, 64, 2000.0, 60.0)
    assert found.engine.args == {"enable-prefix-caching": True}
    assert found.replicas == Replicas(1, 4, "waiting", 10.0)
    assert found.slurm == Slurm(partition="gpu", account="lab", time="4:00:00")
    assert Parallel(tensor=4, pipeline=2, data=3).n_ranks == 24


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        *(("replicas: 3", Replicas(3, 3)), ("replicas: 0", Replicas(0, 1)), ("replicas: {min: 3}", Replicas(3, 3))),
        *(("replicas: {min: 1, max: 4}", Replicas(1, 4)), ("engine:", EngineSpec()), ("parallel: auto", "auto")),
        *(
            ("parallel: {tensor: 4, pipeline: 2}", Parallel(4, 2)),
            ("workload: {ttft_ms: 2.5e+3}", Workload(ttft_ms=2500.0)),
        ),
        *(("name: a", "a"), ("name: " + "a" * 40, "a" * 40)),
    ],
)
def test_short_and_long_forms_are_read(line: str, expected: object) -> None:
    assert getattr(reading.parse(f"model: m\n{line}"), line.partition(":")[0]) == expected


@pytest.mark.parametrize(
    ("model", "name"),
    [
        *(
            ("meta-llama/Llama-3.1-8B", "llama-3-1-8b"),
            ("/models/My Model/", "my-model"),
            ("./Qwen3.gguf", "qwen3-gguf"),
        ),
        *(("org/" + "x" * 60, "x" * 40), ("/", "model"), ("org/___", "model")),
    ],
)
def test_a_name_comes_from_the_model(model: str, name: str) -> None:
    assert reading.from_mapping({"model": model}).name == name


MISSING = "model: is missing (example: model: penstock-demo)"


@pytest.mark.parametrize(("text", "problem"), [("", MISSING), *cases("spec_mistakes.txt")])
def test_each_mistake_is_named_with_its_place(text: str, problem: str) -> None:
    error = refused(text)
    assert error.detail == problem
    assert error.message == "cannot use the file: 1 problem"
    assert error.exit_code == 2


def test_problems_are_reported_together() -> None:
    error = refused("modle: x\nengine: {kind: vlm, max_model_len: x}\ngateway: {prot: 1}\nreplicas: {min: two}")
    assert error.message == "cannot use the file: 6 problems"
    paths = ["modle", "model", "engine.kind", "engine.max_model_len", "replicas.min", "gateway.prot"]
    assert [problem.path for problem in error.problems] == paths
    error = refused("model: m\nname: A-\ngateway: {host: 0.0.0.0, port: -1}\nssh: {}\nray: {}")
    assert [problem.path for problem in error.problems] == ["name", "gateway.port", "gateway.auth", "ssh", "ray"]
    error = refused("model: m\nname: A-\ntarget: foo\nssh: {}\nengine: {kind: vlm}\ngateway: {port: -1}")
    assert [problem.path for problem in error.problems] == ["target", "engine.kind", "name", "gateway.port"]
    assert refused("model: 7").hint == "docs/reference/spec.md lists every field"
    assert refused("modle: x").hint is None


# NAME=value that must not travel, by name and by value, and that may.
SECRET, PUBLIC = (GOLDEN / "secrets.txt").read_text("utf-8").split("\n\n")
CURES = {"local": "export A_TOKEN", "slurm": "cat ~/.A_TOKEN)", "kubernetes": "KeyRef", "vessl": "{A_TOKEN: ITS"}


def test_a_variable_that_looks_like_a_secret_is_refused_and_others_pass() -> None:
    for row in SECRET.split():
        name, _, value = row.replace("~", " ").partition("=")
        with pytest.raises(SpecError) as caught:
            reading.from_mapping({"model": "m", "engine": {"env": {name: value}}})
        assert [problem.path for problem in caught.value.problems] == [f"engine.env.{name}"] or "token" in value, row
    for row in PUBLIC.split():
        name, _, value = row.partition("=")
        assert reading.from_mapping({"model": "m", "engine": {"env": {name: value}}}).engine.variables == {name: value}


@pytest.mark.parametrize(("text", "path"), cases("secrets_elsewhere.txt"))
def test_a_secret_elsewhere_in_the_file_is_refused_and_not_shown(text: str, path: str) -> None:
    (problem,) = refused(text if path == "model" else f"model: m\n{text}").problems
    assert (problem.path, "abc" in str(problem)) == (path, False)


def test_a_refused_secret_has_a_way_to_give_it_and_what_is_none_can_be_declared() -> None:
    for target, cure in CURES.items():
        (problem,) = refused(f"model: m\ntarget: {target}\nengine: {{env: {{A_TOKEN: abc}}}}").problems
        assert cure in str(problem.hint) and "{env: {A_TOKEN: {value: ..., secret: false}}}" in str(problem.hint)
    text = "model: m\nengine: {env: {A_TOKEN: {value: 12345, secret: %s}, B: x}}"
    declared = reading.parse(text % "false")
    assert declared.engine.variables == {"A_TOKEN": "12345", "B": "x"}
    assert reading.parse(reading.to_yaml(declared)) == declared
    assert "(secret: true)" in str(refused(text % "true").detail)


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    assert "it is not YAML: mapping values are not allowed here" in str(refused("a: b: c").detail)
    assert "line 1, column 5" in str(refused("a: b: c").detail)
    for text in ("model: m\nname: 2024-13-45", "a: &a [*a]", "[" * 1500):
        assert refused(text).exit_code == 2
    with pytest.raises(SpecError) as caught:
        reading.load(tmp_path / "none.yaml")
    assert caught.value.message == f'cannot use file "{tmp_path / "none.yaml"}": 1 problem'
    assert caught.value.detail == "could not read it: No such file or directory (check the path)"
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError) as caught:
        reading.load(tmp_path / "binary.yaml")
    assert caught.value.detail == "it is not UTF-8 text"


@pytest.mark.parametrize(("value", "words"), cases("spec_values.txt"))
@pytest.mark.parametrize("field", ["engine.args.x", "engine.env.x", "name", "gateway.price", "kubernetes.labels", "zz"])
def test_no_value_that_yaml_can_make_ends_in_a_fault(field: str, value: str, words: str) -> None:
    *parents, last = field.split(".")
    text = "".join(f"{parent}: {{" for parent in parents) + f"{last}: {value}" + "}" * len(parents)
    for error in (refused(f"model: m\n{text}"), refused("model: m", f"{field}={value}")):
        assert words in str(error.detail)
        str(error.detail).encode()


def test_settings_go_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("model: m\nreplicas: 1\ngateway: {port: 8000}")
    settings = ["gateway.port=9000", "replicas=2", "engine.args.max-num-seqs=4", "workload.ttft_ms=250", "name=n"]
    found = reading.load(path, settings)
    assert (found.gateway.port, found.replicas, found.name) == (9000, Replicas(2, 2), "n")
    assert found.engine.args == {"max-num-seqs": 4}
    assert found.workload.ttft_ms == 250
    fields = {"model": "m", "gateway": {"port": 1}}
    reading.from_mapping(fields, settings=["gateway.port=2"])
    assert fields == {"model": "m", "gateway": {"port": 1}}, "not changed in place"
    error = refused("model: m", "x", "=3", "engine.kidn=vllm", "gateway.port=a: b: c")
    assert error.detail == (
        "--set: 'x' is not key=value (example: --set gateway.port=9000)\n"
        "--set: '=3' is not key=value (example: --set gateway.port=9000)\n"
        'engine.kidn: unknown key (did you mean "kind"?)\n'
        'gateway.port: expected a whole number, got "a: b: c"'
    )


def test_numbers_of_the_environment_become_text_and_mappings_of_flags_json() -> None:
    found = reading.parse("model: m\nengine: {env: {A: 1, B: true, C: 0.5, D: x}, args: {c: {level: 3}, d: 4}}").engine
    assert found.env == {"A": "1", "B": "1", "C": "0.5", "D": "x"}
    assert found.args == {"c": '{"level": 3}', "d": 4}
    keyed = reading.parse("model: m\nengine: {args: {x: {1: 2, 2024-01-01: {null: [{1.5: a}]}}}}").engine
    assert keyed.args["x"] == '{"1": 2, "2024-01-01": {"None": [{"1.5": "a"}]}}'


def test_what_is_written_reads_back_the_same() -> None:
    kept = "model: m\ngateway: {ledger_days: null}"
    for text in ("model: m", FULL, ODD, "model: m\nparallel: {tensor: 2}\nhardware: {gpu: l4}", kept):
        found = reading.parse(text)
        assert reading.parse(reading.to_yaml(found)) == found
    assert reading.parse(kept).gateway.ledger_days is None
    written = reading.to_yaml(reading.parse("model: m"))
    assert not [word for word in ("gpu:", "args", "env", "aliases", "slurm", "cache", "null") if word in written]


def test_differences_name_each_changed_field() -> None:
    before = reading.parse("model: m\ngateway: {port: 8000}")
    after = reading.parse("model: m\ngateway: {port: 9000}\nengine: {max_model_len: 512}\nparallel: {tensor: 2}")
    assert reading.differences(before, after) == [
        "parallel: auto -> (not set)",
        "engine.max_model_len: (not set) -> 512",
        "gateway.port: 8000 -> 9000",
        "parallel.tensor: (not set) -> 2",
        "parallel.pipeline: (not set) -> 1",
        "parallel.data: (not set) -> 1",
        "parallel.expert: (not set) -> False",
    ]
    assert reading.differences(before, before) == []
    before, after = (
        reading.parse(f"model: m\nengine: {{env: {{A: a{n}}}}}\nhardware: {{gpu_ids: {[*range(n)]}}}") for n in (1, 2)
    )
    hidden = ["hardware.gpu_ids[1]: (not set) -> 1", "engine.env.A: *** -> ***"]
    assert sorted(reading.differences(before, after)) == sorted(hidden), "no value of a variable"


@pytest.mark.parametrize(
    ("lines", "auth"),
    [
        *(("", "none"), ("target: ray", "none"), ("target: ssh\nssh: {hosts: [a]}", "keys"), ("target: slurm", "keys")),
        *(("target: slurm\ngateway: {port: 0}", "keys"), ("target: slurm\ngateway: {auth: none}", "none")),
        ("gateway: {host: 0.0.0.0, auth: keys}", "keys"),
    ],
)
def test_machines_that_others_may_log_in_to_need_keys_by_default(lines: str, auth: str) -> None:
    assert reading.parse(f"model: m\n{lines}").gateway.auth == auth


def test_beyond_loopback_keys_are_required() -> None:
    assert all(map(gateway.is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(gateway.is_loopback, ("0.0.0.0", "::", "192.168.1.2", "myhost")))
