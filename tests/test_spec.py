"""The deployment file: what is accepted, what is refused and in which words, and how it is written again."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import SpecError
from penstock.spec import deployment, gateway, reading
from penstock.spec.blocks import Slurm
from penstock.spec.deployment import Deployment, EngineSpec, GatewaySpec, Hardware, Parallel, Replicas, Workload

# DESIGN.md's file, which shows every block.
FULL = """
name: llama70                       # default: from the model
model: meta-llama/Llama-3.1-70B-Instruct   # hub id, or a folder
target: slurm                       # local | ssh | ray | slurm | kubernetes | cloudera | vessl
hardware: {gpu: h100-sxm, gpus_per_node: 4, nodes: 2, network: ib-ndr}   # asked of the target when absent
parallel: auto                      # or {tensor: 4, pipeline: 2, data: 1, expert: false}
engine:                             # vLLM's own names, passed through; version-checked
  kind: auto                        # vllm | llamacpp; auto = vllm on GPUs, llamacpp without one
  max_model_len: 32768
  gpu_memory_utilization: 0.92
  executor: auto                    # ray | mp; auto = mp inside one node, ray across nodes
  args: {enable-prefix-caching: true}
workload: {input_tokens: 2000, output_tokens: 300, concurrency: 64, ttft_ms: 2000, tpot_ms: 60}
replicas: {min: 1, max: 4, metric: waiting, target: 10}
gateway: {port: 8000, auth: keys}
ui: true
observe: {prometheus: true, grafana: true}
cache: {weights: /shared/models}
slurm: {partition: gpu, account: lab, time: "4:00:00"}     # one block per target kind
"""
LEGAL_NAME = " (lower-case letters, digits and dashes, at most 40, letter or digit at both ends)"
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


@pytest.mark.parametrize(
    ("lines", "auth"),
    [
        ("", "none"),
        ("target: ray", "none"),
        ("target: ssh\nssh: {hosts: [a]}", "keys"),
        ("target: slurm", "keys"),
        ("target: slurm\ngateway: {port: 0}", "keys"),
        ("target: slurm\ngateway: {auth: none}", "none"),
    ],
)
def test_machines_that_others_may_log_in_to_need_keys_by_default(lines: str, auth: str) -> None:
    assert reading.parse(f"model: m\n{lines}").gateway.auth == auth


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
        ("replicas: 3", Replicas(3, 3)),
        ("replicas: 0", Replicas(0, 1)),
        ("replicas: {min: 1, max: 4}", Replicas(1, 4)),
        ("replicas: {min: 3}", Replicas(3, 3)),
        ("engine:", EngineSpec()),
        ("parallel: {tensor: 4, pipeline: 2}", Parallel(4, 2)),
        ("parallel: auto", "auto"),
        ("name: a", "a"),
        ("name: " + "a" * 40, "a" * 40),
    ],
)
def test_short_and_long_forms_are_read(line: str, expected: object) -> None:
    assert getattr(reading.parse(f"model: m\n{line}"), line.partition(":")[0]) == expected


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("meta-llama/Llama-3.1-8B", "llama-3-1-8b"),
        ("/models/My Model/", "my-model"),
        ("./Qwen3.gguf", "qwen3-gguf"),
        ("org/" + "x" * 60, "x" * 40),
        ("/", "model"),
        ("org/___", "model"),
    ],
)
def test_a_name_comes_from_the_model(model: str, name: str) -> None:
    assert deployment.default_name(model) == name
    assert reading.from_mapping({"model": model}).name == name


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "model: is missing (example: model: penstock-demo)"),
        ("model:", "model: is missing (example: model: penstock-demo)"),
        ("model: ''", "model: is empty (example: model: penstock-demo)"),
        ("model: 7", "model: expected text, got 7"),
        ("- a", "expected key: value lines, got a list (try: model: penstock-demo)"),
        ("hello", 'expected key: value lines, got "hello" (try: model: penstock-demo)'),
        ("model: m\nmodle: x", 'modle: unknown key (did you mean "model"?)'),
        (
            "model: m\nengine: {max-model-length: 5}",
            'engine.max-model-length: unknown key (did you mean "max_model_len"?)',
        ),
        ("model: m\ncache: {zzz: 1}", "cache.zzz: unknown key (legal: weights)"),
        ("model: m\nengine: 5", "engine: expected key: value lines, got 5"),
        ("model: m\nengine: {kind: vllm, kind: fake}", "engine.kind: is given twice (keep one)"),
        (
            "model: m\nengine: {kind: vlm}",
            'engine.kind: expected auto or vllm or llamacpp or fake, got "vlm" (did you mean "vllm"?)',
        ),
        ("model: m\nengine: {max_model_len: 3.5}", "engine.max_model_len: expected a whole number, got 3.5"),
        ("model: m\nengine: {max_model_len: true}", "engine.max_model_len: expected a whole number, got true"),
        ("model: m\nengine: {drain_s: .inf}", "engine.drain_s: inf is not a finite number"),
        ("model: m\nengine: {stall_s: .nan}", "engine.stall_s: nan is not a finite number"),
        ("model: m\nengine: {stall_s: 0}", "engine.stall_s: 0.0 is below 1"),
        ("model: m\nengine: {env: {A: null}}", "engine.env.A: expected text, got nothing"),
        ("model: m\nengine: {env: {A: [1]}}", "engine.env.A: expected text, got a list"),
        ("model: m\nengine: {gpu_memory_utilization: 1.2}", "engine.gpu_memory_utilization: 1.2 is not in (0, 1]"),
        ("model: m\nparallel: aut", 'parallel: expected auto or key: value lines, got "aut" (did you mean "auto"?)'),
        ("model: m\nparallel: {tensor: 0}", "parallel.tensor: 0 is below 1"),
        ("model: m\nreplicas: x", 'replicas: expected a whole number or key: value lines, got "x"'),
        ("model: m\nreplicas: true", "replicas: expected a whole number or key: value lines, got true"),
        ("model: m\nreplicas: -1", "replicas.min: -1 is below 0"),
        ("model: m\nreplicas: {min: 3, max: 2}", "replicas: min 3 is above max 2"),
        ("model: m\nhardware: {nodes: 0}", "hardware.nodes: 0 is below 1"),
        ("model: m\nworkload: {concurrency: 0}", "workload.concurrency: 0 is below 1"),
        ("model: m\ngateway: {port: 70000}", "gateway.port: 70000 is above 65535"),
        ("model: m\ngateway: {ledger_days: 0}", "gateway.ledger_days: 0 is below 1"),
        ("model: m\ngateway: {aliases: x}", 'gateway.aliases: expected a list of text, got "x"'),
        (
            "model: m\ngateway: {host: 0.0.0.0}",
            'gateway.auth: "none" on host 0.0.0.0 (set gateway.auth: keys, or host: 127.0.0.1)',
        ),
        ("model: m\ngateway: {workers: 0}", "gateway.workers: 0 is not from 1 to 64"),
        (
            "model: m\ngateway: {policy: prefx}",
            'gateway.policy: expected least-load or prefix or sticky or round-robin, got "prefx"'
            ' (did you mean "prefix"?)',
        ),
        ("model: m\ngateway: {max_in_flight: 0}", "gateway.max_in_flight: must be at least 1, or absent"),
        (
            "model: m\ngateway: {queue: {key_share: 2}}",
            "gateway.queue.key_share: 2 is above 1 (1 means the whole queue)",
        ),
        ("model: m\ngateway: {limits: {body_bytes: 0}}", "gateway.limits.body_bytes: 0 is not above 0"),
        ("model: m\ngateway: {limits: {body: 1}}", 'gateway.limits.body: unknown key (did you mean "body_s"?)'),
        ("model: m\ngateway: {tls_key: k.pem}", "gateway.tls_cert: is missing (TLS needs a certificate and its key)"),
        ("model: m\ngateway: {path_prefix: a/}", 'gateway.path_prefix: "a/" is not a path (example: /penstock)'),
        (
            "model: m\ngateway: {allowed_origins: [chat.example]}",
            'gateway.allowed_origins[0]: "chat.example" is not an origin (example: https://chat.example)',
        ),
        (
            "model: m\ngateway: {allowed_origins: ['*']}",
            'gateway.allowed_origins[0]: "*" without keys lets every web page use the engines'
            " (name the origins, or set auth: keys)",
        ),
        ("model: m\ngateway: {upstreams: [{}]}", "gateway.upstreams[0].url: is missing"),
        (
            "model: m\ngateway: {upstreams: [{url: gpu7}]}",
            'gateway.upstreams[0].url: "gpu7" is not an engine\'s URL (example: http://gpu7:8000)',
        ),
        (
            "model: m\ngateway: {upstreams: [{url: 'http://gpu7:8000', key_env: sk-abc}]}",
            "gateway.upstreams[0].key_env: is not the name of an environment variable"
            " (it names a variable; the key itself does not belong into the file)",
        ),
        ("model: m\nui: maybe", 'ui: expected true or false, got "maybe"'),
        ("model: m\nname: Big", 'name: "Big" is not a legal name' + LEGAL_NAME),
        ("model: m\nname: a/../b", 'name: "a/../b" is not a legal name' + LEGAL_NAME),
        (
            "model: m\ntarget: slrum",
            f'target: expected {" or ".join(deployment.TARGETS)}, got "slrum" (did you mean "slurm"?)',
        ),
        ("model: m\nslurm: x", 'slurm: expected key: value lines, got "x"'),
        ("model: m\nreplicas: {metric: gpu}", 'replicas.metric: expected waiting, got "gpu"'),
        ("model: m\nreplicas: {target: -1}", "replicas.target: -1 is not above 0"),
        ("model: m\nreplicas: {target: 0}", "replicas.target: 0 is not above 0"),
        (
            "model: m\nslurm: {partition: gpu}",
            "slurm: block given, but target is local (set target: slurm, or remove it)",
        ),
    ],
)
def test_each_mistake_is_named_with_its_place(text: str, problem: str) -> None:
    error = refused(text)
    assert error.detail == problem
    assert error.message == "cannot use the file: 1 problem"
    assert error.exit_code == 2


def test_problems_are_reported_together() -> None:
    error = refused("modle: x\nengine: {kind: vlm, max_model_len: x}\ngateway: {prot: 1}\nreplicas: {min: two}")
    assert error.message == "cannot use the file: 6 problems"
    assert [problem.path for problem in error.problems] == [
        "modle",
        "model",
        "engine.kind",
        "engine.max_model_len",
        "replicas.min",
        "gateway.prot",
    ]
    error = refused("model: m\nname: A-\ngateway: {host: 0.0.0.0, port: -1}\nssh: {}\nray: {}")
    assert [problem.path for problem in error.problems] == ["name", "gateway.port", "gateway.auth", "ssh", "ray"]
    error = refused("model: m\nname: A-\ntarget: foo\nssh: {}\nengine: {kind: vlm}\ngateway: {port: -1}")
    assert [problem.path for problem in error.problems] == ["target", "engine.kind", "name", "gateway.port"]
    error = refused('model: m\nengine: {env: {"A=B": x, "": y}}')
    assert error.detail == (
        'engine.env: "A=B" is not a name of an environment variable\n'
        'engine.env: "" is not a name of an environment variable'
    )


def test_an_error_without_a_hint_points_to_the_page_of_fields() -> None:
    assert refused("model: 7").hint == "docs/reference/spec.md lists every field"
    assert refused("modle: x").hint is None


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    assert "it is not YAML: mapping values are not allowed here" in str(refused("a: b: c").detail)
    assert "line 1, column 5" in str(refused("a: b: c").detail)
    for text in ("model: m\nname: 2024-13-45", "a: &a [*a]", "[" * 5000):
        assert refused(text).exit_code == 2
    with pytest.raises(SpecError) as caught:
        reading.load(tmp_path / "none.yaml")
    assert caught.value.message == f'cannot use file "{tmp_path / "none.yaml"}": 1 problem'
    assert caught.value.detail == "could not read it: No such file or directory (check the path)"
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError) as caught:
        reading.load(tmp_path / "binary.yaml")
    assert caught.value.detail == "it is not UTF-8 text"


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


def test_a_wrong_setting_is_refused_like_a_wrong_field() -> None:
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


@pytest.mark.parametrize("text", ["model: m", FULL, ODD, "model: m\nparallel: {tensor: 2}\nhardware: {gpu: l4}"])
def test_what_is_written_reads_back_the_same(text: str) -> None:
    found = reading.parse(text)
    assert reading.parse(reading.to_yaml(found)) == found
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


def test_beyond_loopback_keys_are_required() -> None:
    assert all(map(gateway.is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(gateway.is_loopback, ("0.0.0.0", "::", "192.168.1.2", "myhost")))
    assert reading.parse("model: m\ngateway: {host: 0.0.0.0, auth: keys}").gateway.auth == "keys"
    assert reading.parse("model: m\ngateway: {ledger_days: null}").gateway.ledger_days is None
