"""Where a model's files are and what they say: the bundled one, a local folder, or a hub id. Never remote code."""

from __future__ import annotations

import json
import math
import re
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from penstock.errors import UserError
from penstock.plan import ModelFacts, Plan
from penstock.spec import DEMO_MODEL, Deployment
from penstock.units import MIB

BUNDLED = Path(__file__).parent / "demo_model"

# What an engine needs from a hub repository, by the form of the weights.
_PATTERNS = {
    "safetensors": ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.txt", "*.model", "tiktoken*"],
    "gguf": ["*.gguf", "*.json", "*.jinja"],
}


def locate(deployment: Deployment) -> Path:
    """The folder of the model: bundled, local, or downloaded from the hub (resumed, cached).  Raises UserError."""
    if deployment.model == DEMO_MODEL:
        return BUNDLED
    path = Path(deployment.model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path.resolve()
    looks_local = deployment.model.startswith(("/", "./", "../", "~")) or deployment.model.count("/") != 1
    if looks_local or path.exists():
        raise UserError(
            f'cannot use model "{deployment.model}": no such folder',
            detail="A model is a hub id (organisation/name), a folder, or penstock-demo.",
            hint="Check the path, or give a hub id such as Qwen/Qwen3-0.6B.",
        )
    return _from_hub(deployment)


def _from_hub(deployment: Deployment) -> Path:
    try:
        import huggingface_hub
    except ImportError as exc:
        raise UserError(
            f'cannot fetch model "{deployment.model}": the package huggingface_hub is not installed',
            hint="pip install huggingface_hub",
        ) from exc
    form = (
        "gguf" if deployment.engine.kind == "llamacpp" or deployment.model.lower().endswith("gguf") else "safetensors"
    )
    patterns = _PATTERNS[form]
    try:
        if form == "gguf":
            chosen = choose_gguf(huggingface_hub.list_repo_files(deployment.model))
            patterns = [*_PATTERNS["gguf"][1:], *chosen]
        return Path(
            huggingface_hub.snapshot_download(
                deployment.model, allow_patterns=patterns, cache_dir=deployment.cache.weights
            )
        )
    except Exception as exc:  # its HTTP library, and so the family of a lost connection, changes by version
        raise _hub_error(deployment.model, exc) from exc


def on_this_node(plan: Plan) -> Plan:
    """The plan with the model's files where this machine has them: it may have been made on another.

    The bundled model is in every copy of penstock; a folder must be at the same path; a hub model comes from this
    machine's own cache, or the hub, in the same revision.  Raises UserError when it is none of these.
    """
    model = plan.model
    if model.reference == DEMO_MODEL:
        path = read_facts(model.reference, BUNDLED, model.form).path
    elif Path(model.path).exists():
        return plan
    elif _SNAPSHOT.search(model.path):
        path = _snapshot_here(model)
    else:
        raise UserError(
            f'cannot find model "{model.reference}": there is no "{model.path}" on {socket.gethostname()}',
            hint="Put it on a file system that every node has at this path, or use a hub id.",
        )
    return msgspec.structs.replace(plan, model=msgspec.structs.replace(model, path=path))


# Of huggingface_hub's cache: models--Qwen--Qwen3-0.6B/snapshots/c1899de289a04d12100db370d81485cdf75e47ca/...
_SNAPSHOT = re.compile(r"/models--[^/]+/snapshots/([0-9a-f]{40})(/.*)?\Z")


def _snapshot_here(model: ModelFacts) -> str:
    """The path, in this machine's cache, of a hub model that has another path elsewhere."""
    try:
        import huggingface_hub
    except ImportError as exc:
        raise UserError(
            f'cannot fetch model "{model.reference}" on {socket.gethostname()}: huggingface_hub is not installed there',
            hint="pip install huggingface_hub there, or put the model on a file system that every node has.",
        ) from exc
    found = _SNAPSHOT.search(model.path)
    assert found is not None
    revision, inside = found.group(1), (found.group(2) or "").lstrip("/")
    patterns = _PATTERNS[model.form] if model.form in _PATTERNS and not inside else [inside, *_PATTERNS["gguf"][1:]]
    try:
        folder = huggingface_hub.snapshot_download(model.reference, revision=revision, allow_patterns=patterns)
    except Exception as exc:  # as in `_from_hub`
        raise _hub_error(model.reference, exc) from exc
    return str(Path(folder) / inside)


def _hub_error(model: str, exc: Exception) -> UserError:
    kind = type(exc).__name__
    hints = {
        "GatedRepoError": "Accept the model's licence on its hub page, then set HF_TOKEN.",
        "RepositoryNotFoundError": "Check the name; a private model needs HF_TOKEN.",
        "LocalEntryNotFoundError": "This machine does not reach the hub: copy the model's folder here, give its path.",
    }
    return UserError(
        f'could not fetch model "{model}" from the hub: {kind}',
        detail=" ".join(str(exc).split())[:500],
        hint=hints.get(kind, "Check the network, or give a local folder."),
    )


def choose_gguf(names: Sequence[str]) -> list[str]:
    """The files of one quantisation among a repository's: Q4_K_M, else Q8_0, else the first; all its parts."""
    files = sorted(name for name in names if name.lower().endswith(".gguf") and "mmproj" not in name.lower())
    for wanted in ("q4_k_m", "q8_0", ""):
        found = [name for name in files if wanted in name.lower()]
        if found:
            stem = found[0].split("-00001-of-")[0]
            return [name for name in found if name.startswith(stem)] if "-00001-of-" in found[0] else found[:1]
    return []


def forms_of(path: Path) -> tuple[str, ...]:
    """The forms of weights in a model's folder: "safetensors", "gguf", both, or none."""
    if path.is_file():
        return ("gguf",)
    # Hub repositories keep large quantisations of a GGUF in folders of their own.
    found = {"safetensors": any(path.glob("*.safetensors")), "gguf": bool(_gguf_files(path))}
    return tuple(form for form, is_there in found.items() if is_there)


def _gguf_files(path: Path) -> list[Path]:
    """GGUF files of a folder and of the folders in it; no deeper, since a path may be given by mistake ("/")."""
    return [*path.glob("*.gguf"), *path.glob("*/*.gguf")]


def read_facts(reference: str, path: Path, form: str) -> ModelFacts:
    """What the files of one form say.  Raises UserError for a folder that holds no such model."""
    if form == "gguf":
        return _gguf_facts(reference, path)
    if path.is_file():
        raise UserError(
            f'cannot use model file "{path}": not a folder with config.json and *.safetensors',
            hint="Use --engine llamacpp for a GGUF file.",
        )
    config_path = path / "config.json"
    if not config_path.is_file():
        raise UserError(
            f'cannot use model folder "{path}": no config.json',
            detail=f"It holds {_listing(path)}.",
            hint="Give the folder that has config.json, tokenizer and *.safetensors (the full path, not its parent).",
        )
    try:
        config = json.loads(config_path.read_text("utf-8"))
    except ValueError as exc:
        raise UserError(f'cannot use model folder "{path}": config.json is not JSON', detail=str(exc)) from exc
    if not isinstance(config, dict):
        raise UserError(f'cannot use model folder "{path}": config.json is not an object')
    shards = sorted(path.glob("*.safetensors"))
    # Multimodal configs keep the language model's numbers one level down.
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    assert isinstance(text, dict)
    n_heads, hidden = _number(text, "num_attention_heads"), _number(text, "hidden_size")
    return ModelFacts(
        reference=reference,
        path=str(path),
        form="safetensors" if shards else "none",
        architecture=str((config.get("architectures") or ["unknown"])[0]),
        weights_bytes=sum(shard.stat().st_size for shard in shards),
        n_shards=len(shards),
        n_layers=_number(text, "num_hidden_layers"),
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=_number(text, "num_key_value_heads") or n_heads,
        head_dim=_number(text, "head_dim") or (hidden // n_heads if n_heads else 0),
        vocab=_number(text, "vocab_size"),
        max_position=_number(text, "max_position_embeddings") or 4096,
    )


def _number(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) else 0


def _listing(path: Path) -> str:
    names = sorted(item.name for item in path.iterdir())
    if not names:
        return "nothing"
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _gguf_facts(reference: str, path: Path) -> ModelFacts:
    files = [path]
    if path.is_dir():
        names = [str(file.relative_to(path)) for file in _gguf_files(path)]
        files = [path / name for name in choose_gguf(names)]
    if not files:
        raise UserError(
            f'cannot use model folder "{path}": no *.gguf in it',
            detail=f"It holds {_listing(path)}. The embedded engine (llamacpp) loads GGUF files only.",
            hint="Use --engine vllm, or a folder with a GGUF file.",
        )
    try:
        with files[0].open("rb") as stream:
            keys = read_gguf_keys(stream)
    except (OSError, ValueError, struct.error) as exc:
        raise UserError(f'cannot read "{files[0]}": it is not a GGUF file', detail=str(exc)) from exc
    architecture = str(keys.get("general.architecture", "unknown"))

    def number(key: str) -> int:
        value = keys.get(f"{architecture}.{key}")
        return value if isinstance(value, int) else 0

    n_heads, hidden = number("attention.head_count"), number("embedding_length")
    return ModelFacts(
        reference=reference,
        path=str(files[0]),
        form="gguf",
        architecture=architecture,
        weights_bytes=sum(file.stat().st_size for file in files),
        n_shards=len(files),
        n_layers=number("block_count"),
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=number("attention.head_count_kv") or n_heads,
        head_dim=number("attention.key_length") or (hidden // n_heads if n_heads else 0),
        vocab=number("vocab_size"),
        max_position=number("context_length") or 4096,
    )


# https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: value types of the key-value header.
_GGUF_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_GGUF_STRING, _GGUF_ARRAY = 8, 9
_MAX_GGUF_TEXT_BYTES = 16 * MIB  # chat templates are the longest, some 10 KB; a damaged length must not fill the memory


def read_gguf_keys(stream: BinaryIO) -> dict[str, object]:
    """The scalar and text keys of a GGUF header; arrays are skipped.  Raises ValueError or struct.error."""
    if stream.read(4) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version, _, n_keys = struct.unpack("<IQQ", stream.read(20))
    if version < 2:
        raise ValueError(f"GGUF version {version} is too old")
    keys: dict[str, object] = {}
    for _ in range(n_keys):
        name = _gguf_text(stream)
        (kind,) = struct.unpack("<I", stream.read(4))
        keys[name] = _gguf_value(stream, kind)
    return keys


def _gguf_text(stream: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", stream.read(8))
    if length > _MAX_GGUF_TEXT_BYTES:
        raise ValueError(f"a text of {length} bytes in its header")
    return stream.read(length).decode("utf-8", "replace")


def _gguf_value(stream: BinaryIO, kind: int) -> object:
    if kind == _GGUF_STRING:
        return _gguf_text(stream)
    if kind == _GGUF_ARRAY:
        item, length = struct.unpack("<IQ", stream.read(12))
        if item in _GGUF_SCALARS:
            stream.seek(struct.calcsize(_GGUF_SCALARS[item]) * length, 1)
        else:
            for _ in range(length):
                _gguf_value(stream, item)
        return None
    if kind not in _GGUF_SCALARS:
        raise ValueError(f"unknown GGUF value type {kind}")
    shape = _GGUF_SCALARS[kind]
    value = struct.unpack(shape, stream.read(struct.calcsize(shape)))[0]
    return None if isinstance(value, float) and math.isnan(value) else value
