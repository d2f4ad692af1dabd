"""What a user types as a model's source, where its files are and what they say.

GGUF headers are written here byte by byte; hubs are on loopback.
"""

from __future__ import annotations

import json
import shutil
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import huggingface_hub.errors
import msgspec
import pytest
from hub_server import COMMIT, asked_hub
from samples import DEMO, demo_plan, deployment

from penstock import targets
from penstock.deployment import prepare
from penstock.errors import UserError
from penstock.models import ModelFacts, demo, facts, fetch, files, sources
from penstock.models.facts import read_files
from penstock.models.files import BUNDLED
from penstock.models.hub import HubError
from penstock.models.sources import Source
from penstock.node import model_files
from penstock.node.staging import Stage
from penstock.planner import Plan, kv_bytes_per_token
from penstock.run_folder import Launch
from penstock.spec.deployment import Cache, Deployment
from penstock.targets import Surveyed

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


def record(reference: str, path: Path, form: str) -> ModelFacts:
    return read_files(path, reference, form)[1]


def refused(call: Callable[[], object]) -> UserError:
    with pytest.raises(UserError) as caught:
        call()
    assert caught.value.exit_code == 2
    return caught.value


def folder(path: Path, config: object = CONFIG, shards: int = 2) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for number in range(shards):
        (path / f"model-{number}.safetensors").write_bytes(b"x" * 100)
    return path


def test_a_folder_says_what_planning_needs(tmp_path: Path) -> None:
    """A multimodal config keeps its numbers one level down; what a config leaves out has its usual value."""
    facts = record("me/m", folder(tmp_path / "m"), "safetensors")
    assert (facts.reference, facts.path, facts.form) == ("me/m", str(tmp_path / "m"), "safetensors")
    assert (facts.architecture, facts.weights_bytes, facts.n_shards) == ("LlamaForCausalLM", 200, 2)
    assert (facts.n_layers, facts.hidden, facts.n_heads, facts.n_kv_heads, facts.head_dim) == (2, 64, 8, 2, 8)
    assert (facts.vocab, facts.max_position) == (100, 512)
    facts = record("m", folder(tmp_path / "m", {"architectures": ["X"], "text_config": CONFIG}), "safetensors")
    assert (facts.architecture, facts.n_layers, facts.n_kv_heads) == ("X", 2, 2)
    config = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    facts = record("m", folder(tmp_path / "n", config, shards=0), "safetensors")
    assert (facts.n_kv_heads, facts.head_dim, facts.max_position, facts.architecture) == (4, 16, 4096, "unknown")
    assert facts.form == "none"


def test_a_folder_without_a_model_says_what_it_holds(tmp_path: Path) -> None:
    error = refused(lambda: record("m", tmp_path, "safetensors"))
    assert error.message == f'cannot use model folder "{tmp_path}": no config.json'
    assert error.detail == "It holds nothing."
    for number in range(8):
        (tmp_path / f"{number}.bin").touch()
    error = refused(lambda: record("m", tmp_path, "safetensors"))
    assert error.detail == "It holds 0.bin, 1.bin, 2.bin, 3.bin, 4.bin, 5.bin and 2 more."
    assert "Give the folder that has config.json" in str(error.hint)
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "mmproj-m.gguf").touch()  # no language model
    error = refused(lambda: record("m", tmp_path / "gguf", "gguf"))
    assert error.message == f'cannot use model folder "{tmp_path / "gguf"}": no *.gguf in it'
    assert "It holds mmproj-m.gguf." in str(error.detail)
    assert error.hint == "Use --engine vllm, or a folder with a GGUF file."


def test_a_source_is_read_from_what_a_user_types(tmp_path: Path) -> None:
    for text, source in (
        ("Qwen/Qwen3-0.6B", Source("hub", "Qwen/Qwen3-0.6B")),
        ("hf://Qwen/Qwen3-0.6B@v1.0", Source("hub", "Qwen/Qwen3-0.6B", "v1.0")),
        ("ms://Qwen/Qwen3-0.6B", Source("modelscope", "Qwen/Qwen3-0.6B")),
        ("org/name:Q4_K_M", Source("hub", "org/name", None, "Q4_K_M")),
        ("hf://org/name@abc/q4/m.gguf", Source("hub", "org/name", "abc", "q4/m.gguf")),
        ("s3://bucket/a/b/", Source("store", "s3://bucket/a/b")),
        (str(tmp_path), Source("folder", str(tmp_path))),
        (f"file://{tmp_path}", Source("folder", str(tmp_path))),
    ):
        assert sources.parse(text) == source
    assert sources.parse("org/name@main", "v2").revision == "v2"
    for text in (f"{tmp_path}/none", f"file://{tmp_path}/none", "name", "org/../name", "http://host/x", "a/b/../../c"):
        with pytest.raises(UserError):
            sources.parse(text)


def test_a_folder_with_a_link_out_of_it_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(b"abc")
    assert sources.resolve(sources.parse(str(folder))).n_bytes == 3
    (tmp_path / "secret.json").touch()
    (folder / "b.json").symlink_to("../secret.json")
    with pytest.raises(UserError, match="it is a link out of"):
        sources.resolve(sources.parse(str(folder)))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(*pairs: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, 0, len(pairs)) + b"".join(pairs)


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


GGUF = gguf(
    pair("general.architecture", 8, text("llama")),
    pair("tokenizer.tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + text("bc")),
    pair("tokenizer.scores", 9, struct.pack("<IQ", 6, 3) + bytes(12)),
    pair("llama.rope.freq", 6, struct.pack("<f", float("nan"))),
    pair("general.flag", 7, b"\x01"),
    pair("llama.block_count", 4, struct.pack("<I", 2)),
    pair("llama.embedding_length", 4, struct.pack("<I", 64)),
    pair("llama.attention.head_count", 4, struct.pack("<I", 8)),
    pair("llama.attention.head_count_kv", 4, struct.pack("<I", 2)),
    pair("llama.context_length", 10, struct.pack("<Q", 512)),
)


def test_a_gguf_header_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "m-Q8_0.gguf"
    path.write_bytes(GGUF)
    facts = record("m", tmp_path, "gguf")
    assert (facts.path, facts.form, facts.architecture) == (str(path), "gguf", "llama")
    assert (facts.weights_bytes, facts.n_shards) == (len(GGUF), 1)
    assert (facts.n_layers, facts.hidden, facts.n_heads, facts.n_kv_heads, facts.head_dim) == (2, 64, 8, 2, 8)
    assert (facts.max_position, facts.vocab) == (512, 0)
    assert record("m", path, "gguf") == facts
    error = refused(lambda: record("m", path, "safetensors"))
    assert error.message == f'cannot use model file "{path}": not a folder with config.json and *.safetensors'
    assert error.hint == "Use --engine llamacpp for a GGUF file."


def test_what_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for data, problem in (
        (b"", "it does not begin with GGUF"),
        (b"PK\x03\x04", "it does not begin with GGUF"),
        (gguf(version=1), "GGUF version 1 is too old"),
        (gguf(pair("a", 99, b"")), "unknown GGUF value type 99"),
        (gguf(struct.pack("<Q", 2**62)), f"a text of {2**62} bytes in its header"),
        (GGUF[:60], "requires a buffer"),
    ):
        path.write_bytes(data)
        error = refused(lambda: record("m", path, "gguf"))
        assert error.message == f'cannot read "{path}": it is not a GGUF file'
        assert problem in str(error.detail)


def test_one_quantisation_is_chosen_with_all_its_parts(tmp_path: Path) -> None:
    parts = ["q/m-q4_k_m-00001-of-00002.gguf", "q/m-q4_k_m-00002-of-00002.gguf"]
    for names, chosen in (
        (["m-Q8_0.gguf", "m-Q4_K_M.gguf", "README.md"], ["m-Q4_K_M.gguf"]),
        (["m-F16.gguf", "m-Q8_0.gguf"], ["m-Q8_0.gguf"]),
        (["b.gguf", "a.gguf", "mmproj-a.gguf"], ["a.gguf"]),
        ([*reversed(parts), "m-q8_0.gguf"], parts),
        (["config.json", "mmproj.gguf"], []),
    ):
        assert files.choose_gguf(names) == chosen
    for number in (1, 2):
        (tmp_path / f"m-Q8_0-0000{number}-of-00002.gguf").write_bytes(GGUF)
    facts = record("m", tmp_path, "gguf")
    assert (facts.weights_bytes, facts.n_shards) == (2 * len(GGUF), 2)
    assert facts.path.endswith("00001-of-00002.gguf")


def test_the_bundled_model_is_what_its_config_says() -> None:
    path = files.locate(deployment("penstock-demo"))
    assert files.forms_of(path) == ("safetensors", "gguf")
    for form in ("safetensors", "gguf"):
        facts = record("penstock-demo", path, form)
        assert (facts.n_layers, facts.hidden, facts.n_heads, facts.n_kv_heads, facts.head_dim) == (4, 256, 8, 4, 32)
        assert (facts.max_position, kv_bytes_per_token(facts), facts.n_shards) == (1024, 2048, 3)
        assert facts.weights_bytes > 6_000_000


def test_a_local_path_is_taken_before_the_hub_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = folder(tmp_path / "org").joinpath("name")
    path.mkdir()
    assert files.locate(deployment("org/name")) == path
    (tmp_path / "m.gguf").touch()
    assert files.locate(deployment("./m.gguf")) == tmp_path / "m.gguf"
    error = refused(lambda: files.locate(deployment("llama-3.1-70b")))
    assert error.hint == "Give its hub id: meta-llama/Meta-Llama-3.1-70B."
    for model in ("/nowhere/m", "./m", "~/no-such-model", "penstock-dem", "a/b/c"):
        error = refused(lambda: files.locate(deployment(model)))  # noqa: B023 - called at once
        assert error.message == f'cannot use model "{model}": no such folder'
        assert error.hint == "Check the path, or give a hub id such as Qwen/Qwen3-0.6B."


def fetched(tmp_path: Path, model: str, engine: str = "auto") -> Path:
    settings = {"engine": {"kind": engine}, "cache": {"weights": str(tmp_path / "cache")}}
    return fetch.locate(deployment(model, **settings))


# What no engine reads next to the weights: copies of them in other forms, code, words.
OTHERS: tuple[str, ...] = (
    "original/consolidated.00.pth",
    "original/params.json",
    "consolidated.safetensors",
    "pytorch_model.bin",
)
OTHERS += ("README.md", "onnx/model.onnx", ".gitattributes", "modeling_x.py")


@pytest.mark.loopback
def test_only_the_files_that_an_engine_needs_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Safetensors and texts, or one quantisation in GGUF; pickled weights only where the file allows it."""
    names = ("m-Q8_0.gguf", "m-Q4_K_M.gguf", "b-F16-00001-of-00002.gguf", "b-F16-00002-of-00002.gguf", "m.safetensors")
    weights = {name: name.encode() for name in (*names, *OTHERS)}
    with asked_hub(monkeypatch, "org/name", {"config.json": b"{}", **weights}) as server:
        for model, engine, expected in (
            ("org/name", "auto", {"m.safetensors"}),
            ("hf://org/name@main", "auto", {"m.safetensors"}),
            ("org/name", "llamacpp", {"m-Q4_K_M.gguf"}),
            ("org/name:Q8_0", "llamacpp", {"m-Q8_0.gguf"}),
            ("org/name/m-Q8_0.gguf", "auto", {"m-Q8_0.gguf"}),
            ("org/name/b-F16-00001-of-00002.gguf", "auto", {"b-F16-00001-of-00002.gguf", "b-F16-00002-of-00002.gguf"}),
        ):
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
            path = fetched(tmp_path, model, engine)
            folder = path if path.is_dir() else path.parent
            assert folder == tmp_path / "cache" / "models--org--name" / "snapshots" / COMMIT
            assert {file.name for file in folder.iterdir()} == expected | {"config.json", "MANIFEST.json"}
            assert path == folder or (path.name in expected and files.forms_of(path) == ("gguf",))
        server.files = {"config.json": b"{}", "consolidated.safetensors": b"", "params.json": b"{}"}  # Mistral's names
        shutil.rmtree(tmp_path / "cache")
        assert {file.name for file in fetched(tmp_path, "org/name").iterdir()} == {*server.files, "MANIFEST.json"}
        shutil.rmtree(tmp_path / "cache")
        server.files = {"config.json": b"{}"}
        error = refused(lambda: fetched(tmp_path, "org/name"))
        assert "no file of weights that an engine loads" in error.message and error.detail == "It has config.json."
        server.files = {"config.json": b"{}", "m.bin": b"x"}
        error = refused(lambda: fetched(tmp_path, "org/name"))
        assert "Its weights are pickled" in str(error.detail) and "cache.allow_pickle" in str(error.hint)
        settings = {"cache": {"weights": str(tmp_path / "cache"), "allow_pickle": True}}
        assert (fetch.locate(deployment("org/name", **settings)) / "m.bin").is_file()


@pytest.mark.loopback
def test_what_another_program_fetched_is_used_when_the_hub_is_not_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with asked_hub(monkeypatch, "org/name", {"config.json": b"{}", "m.safetensors": b"x"}) as server:
        folder = fetched(tmp_path, "org/name")
        (folder / "MANIFEST.json").unlink()
        server.status = 503
        assert fetched(tmp_path, "org/name") == folder
        (folder / "m.safetensors").unlink()
        with pytest.raises(HubError):
            fetched(tmp_path, "org/name")


class ConnectError(Exception):
    """As httpx has it: no OSError."""


NO_NETWORK = "Check the network, or give a local folder."
NO_HUB = "This machine does not reach the hub: copy the model's folder here, give its path."
ERRORS = [
    ("GatedRepoError", "it is gated", "Accept the licence on its hub page, then set HF_TOKEN."),
    ("RepositoryNotFoundError", "a private one", "Check the name; a private model needs HF_TOKEN."),
    ("LocalEntryNotFoundError", "the hub was not reached", NO_HUB),
    *((name, name, NO_NETWORK) for name in ("HFValidationError", "OfflineModeIsEnabled", "ConnectError")),
]


@pytest.mark.parametrize(("name", "message", "hint"), ERRORS)
def test_an_error_of_the_hub_is_explained(monkeypatch: pytest.MonkeyPatch, name: str, message: str, hint: str) -> None:
    kind: Any = getattr(huggingface_hub.errors, name, ConnectError)
    is_answer = issubclass(kind, huggingface_hub.errors.HfHubHTTPError)
    answer = {"response": SimpleNamespace(headers={}, request=None, status_code=403)} if is_answer else {}
    error = kind("the hub's\n  own words", **answer)

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    for model in ("org/name", "org/name-gguf"):
        caught = refused(lambda: fetch.locate(deployment(model)))  # noqa: B023 - called at once
        assert f'"{model}"' in caught.message and message in caught.message
        assert "the hub's own words" in str(caught.detail)
        assert caught.hint == hint and caught.__cause__ is error


def test_without_the_hubs_package_the_line_that_installs_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    caught = refused(lambda: fetch.locate(deployment("org/name")))
    assert "huggingface_hub is not installed" in caught.message and "pip install huggingface_hub" in str(caught.hint)


def planned(path: str, reference: str, form: str = "safetensors") -> Plan:
    facts = msgspec.structs.replace(DEMO, path=path, reference=reference, form=form)
    return msgspec.structs.replace(demo_plan(), model=facts)


def here(plan: Plan, cache: str | None = None, show: Callable[[fetch.Progress], None] = lambda _: None) -> Plan:
    """On a node without others."""
    launch = Launch("x", plan, (), "", cache=Cache(weights=cache))
    return model_files.on_this_node(plan, Stage(launch, None, lambda: False), show)


def test_a_node_has_its_own_copy_of_the_bundled_model_and_folders_where_they_were(tmp_path: Path) -> None:
    plan = here(planned("/elsewhere/penstock/models/demo_model", "penstock-demo"))
    assert plan.model.path == str(files.BUNDLED)
    gguf = here(planned("/elsewhere/penstock-demo.gguf", "penstock-demo", "gguf"))
    assert gguf.model.path == str(demo.gguf_file())
    folder = planned(str(tmp_path), str(tmp_path))
    assert here(folder) is folder
    bucket = planned("s3://bucket/model", "org/model")
    assert here(bucket) is bucket, "its engine reads it"
    with pytest.raises(UserError, match='there is no "/nowhere/model" on '):
        here(planned("/nowhere/model", "/nowhere/model"))


@pytest.mark.loopback
def test_a_node_fetches_a_hub_model_in_the_planned_revision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    base, seen = f"/elsewhere/hub/models--org--name/snapshots/{COMMIT}", list[fetch.Progress]()
    weights = {"config.json": b"{}", "m.safetensors": b"x", "q4/x-q4.gguf": b"y"}
    with asked_hub(monkeypatch, "org/name", weights) as server:
        plan = here(planned(base, "org/name@main"), show=seen.append)
        assert plan.model.path == f"{tmp_path}/hub/models--org--name/snapshots/{COMMIT}"
        assert seen[-1].done == "2/2 files, 3 B of 3 B" and f"GET api/models/org/name/revision/{COMMIT}" in server.asked
        gguf = here(planned(f"{base}/q4/x-q4.gguf", "org/name:q4", "gguf"))
        assert gguf.model.path == f"{plan.model.path}/q4/x-q4.gguf" and Path(gguf.model.path).read_bytes() == b"y"
        own = f"{tmp_path}/own/models--org--name/snapshots/{COMMIT}"
        (tmp_path / "own").mkdir()
        assert here(planned(own, "org/name"), str(tmp_path / "own")).model.path == own, "a cache that every node has"


def test_a_node_refuses_a_source_that_is_not_the_planned_version(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = sources.Listing(sources.parse("s3://bucket/m"), "1" * 40, {"m.gguf": sources.RemoteFile(1)})
    monkeypatch.setattr(sources, "resolve", lambda *_: listing)
    old = planned(f"/elsewhere/.penstock/models/store--s3--bucket--m/{'0' * 40}/q/m.gguf", "s3://bucket/m", "gguf")
    with pytest.raises(UserError, match="its files have changed since this was planned") as caught:
        here(old)
    assert caught.value.detail == f"Planned with version {'0' * 12}; now it is {'1' * 12}."


def test_a_hub_model_is_planned_from_its_headers_where_nodes_download_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = read_files(BUNDLED, "org/name", "safetensors")[0]
    monkeypatch.setattr(facts, "read", lambda _: whole)
    monkeypatch.setattr(facts, "_read_kept", lambda *_: facts.Kept("0" * 40, whole))
    wanted = deployment("org/name", target="ssh", cache={"weights": str(tmp_path)})
    there = prepare._model_elsewhere(wanted, is_rehearsal=False)
    assert there is not None
    assert prepare._model_elsewhere(deployment("org/name"), is_rehearsal=False) is None, "a local start downloads it"
    assert prepare._model_elsewhere(deployment("org/name"), is_rehearsal=True) is not None, "and a rehearsal does not"
    record = there["safetensors"][1]
    assert record.path == f"{tmp_path}/models--org--name/snapshots/{'0' * 40}"
    assert (record.weights_bytes, record.n_layers) == (whole.index_bytes, 4)
    monkeypatch.setattr(facts, "_read_kept", lambda *_: None)
    assert prepare._model_elsewhere(wanted, is_rehearsal=False) is None, "without its commit it is downloaded here"
    assert prepare._model_elsewhere(wanted, is_rehearsal=True) is not None, (
        "a rehearsal without network takes what is known"
    )


def test_a_folder_that_only_the_nodes_have_is_read_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Nodes:
        has_own_caches = shares_files = False
        capabilities = frozenset({"survey"})

        def survey(self, _: Deployment, argv: Sequence[str], timeout_s: float) -> list[Surveyed]:
            assert argv[:2] == ["-m", "penstock.models.facts"]
            codes = [facts.main(str(path)) for path in ("/no/such/folder", found_there)]
            printed = capsys.readouterr()
            return [Surveyed("node1", codes[0], err=printed.err), Surveyed("node2", codes[1], printed.out, printed.err)]

    monkeypatch.setattr(targets, "load", lambda _: Nodes())
    wanted, found_there = deployment("/models/demo"), BUNDLED
    there = prepare._model_elsewhere(wanted, is_rehearsal=False)
    assert there is not None and there["safetensors"][1] == read_files(BUNDLED, str(BUNDLED), "safetensors")[1]
    assert set(there) == {"safetensors", "gguf"}
    assert prepare._model_elsewhere(deployment(str(BUNDLED)), is_rehearsal=False) is None
    found_there = Path("/no/such/folder")
    error = refused(lambda: prepare._model_elsewhere(wanted, is_rehearsal=False))
    assert error.message == 'cannot use model "/models/demo": neither this machine nor its nodes have it'
    assert error.detail is not None and error.detail.splitlines()[0] == "node1: no such folder"
