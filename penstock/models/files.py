"""Where a model's files are and what they say: the bundled one, a local folder, or a hub id. Never remote code."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.errors import UserError
from penstock.models import ModelFacts
from penstock.models.gguf import read_gguf_keys
from penstock.spec.deployment import DEMO_MODEL, Deployment

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
