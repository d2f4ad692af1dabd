"""Where a model's files are, which of them an engine reads, their JSON and headers. Never remote code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import UserError
from penstock.models import Header, StoredTensor, catalog
from penstock.spec.deployment import DEMO_MODEL, Deployment

BUNDLED = Path(__file__).parent / "demo_model"

# What an engine needs from a hub repository, by the form of the weights.
PATTERNS = {
    "safetensors": ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.txt", "*.model", "tiktoken*"),
    "gguf": ("*.gguf", "*.json", "*.jinja"),
}
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
# Files that run code of their author when they are loaded: https://docs.python.org/3/library/pickle.html
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000


class _Row(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def locate(deployment: Deployment) -> Path:
    """The folder or GGUF file of a model that is on this machine: bundled, or a path.  Raises UserError."""
    if deployment.model == DEMO_MODEL:
        return BUNDLED
    path = Path(deployment.model.removeprefix("file://")).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path.resolve()
    known = None if "/" in deployment.model else catalog.find(deployment.model)
    hub_id = catalog.model(known).hf_id if known else None
    raise UserError(
        f'cannot use model "{deployment.model}": no such folder',
        detail="A model is a hub id (organisation/name), a folder, or penstock-demo.",
        hint=f"Give its hub id: {hub_id}." if hub_id else "Check the path, or give a hub id such as Qwen/Qwen3-0.6B.",
    )


def patterns_of(form: str, inside: str = "") -> tuple[str, ...]:
    """What to fetch of a repository for a model that was planned with `inside`, a GGUF file or the first of its parts.

    "q4/m-00001-of-00002.gguf" -> "q4/m-*-of-00002.gguf" and what every GGUF needs.
    """
    if not inside and form in PATTERNS:
        return PATTERNS[form]
    return (inside.replace("-00001-of-", "-*-of-"), *PATTERNS["gguf"][1:])


def choose_gguf(names: Sequence[str]) -> list[str]:
    """The files of one quantisation: Q4_K_M, else Q8_0, else the first; all its parts."""
    files = sorted(name for name in names if name.lower().endswith(".gguf") and "mmproj" not in name.lower())
    for wanted in ("q4_k_m", "q8_0", ""):
        matches = [name for name in files if wanted in name.lower()]
        if matches:
            stem, is_split, _ = matches[0].partition("-00001-of-")
            return [name for name in matches if name.startswith(stem)] if is_split else matches[:1]
    return []


def forms_of(path: Path) -> tuple[str, ...]:
    """The forms of weights in a model's folder: "safetensors", "gguf", both, or none."""
    if path.is_file():
        return ("gguf",)
    # Hub repositories keep large quantisations of a GGUF in folders of their own.
    forms = {"safetensors": any(path.glob("*.safetensors")), "gguf": path == BUNDLED or bool(_gguf_files(path))}
    return tuple(form for form, is_there in forms.items() if is_there)


def _gguf_files(path: Path) -> list[Path]:
    """GGUF files of a folder and of the folders in it; no deeper, since a path may be wrong ("/")."""
    return [*path.glob("*.gguf"), *path.glob("*/*.gguf")]


def wanted_shards(folder: Path) -> list[str]:
    """The safetensors files that an engine would read from a folder: the index's, else those that are there."""
    if not (folder / INDEX).is_file():
        # As vLLM filters them (`default_loader.py`): Mistral's consolidated.* repeats the others, where both are.
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        return [name for name in names if not name.startswith("consolidated")] or names
    try:
        index = json.loads((folder / INDEX).read_text("utf-8"))
    except (OSError, ValueError):
        return []
    return shards_of(index) if isinstance(index, dict) else []


def pickles(folder: Path) -> list[Path]:
    """The pickled weights in a folder, which can run code when they are loaded."""
    return [path for path in sorted(folder.iterdir()) if path.name.endswith(PICKLES) and path.is_file()]


def shards_of(index: Mapping[str, Any]) -> list[str]:
    """The files that an index names; names that lead out of the folder are left out."""
    table = index.get("weight_map")
    names = set(map(str, table.values())) if isinstance(table, dict) else set[str]()
    return sorted(name for name in names if name.endswith(".safetensors") and ".." not in name and name[0] != "/")


def gguf_parts(path: Path) -> list[Path]:
    """The file itself, or the quantisation chosen in a folder."""
    if path.is_file():
        return [path]
    return [path / name for name in choose_gguf([str(file.relative_to(path)) for file in _gguf_files(path)])]


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model's folder.  Raises UserError."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as exc:
        raise UserError(
            f'cannot use model folder "{path.parent}": no {path.name}',
            detail=f"It holds {listing(path.parent)}.",
            hint="Give the folder that has config.json, tokenizer and *.safetensors (the full path, not its parent).",
        ) from exc
    except OSError as exc:
        raise UserError(f'could not read "{path}": {exc.strerror}') from exc
    except (ValueError, RecursionError) as exc:
        raise UserError(f'cannot use "{path}": it is not JSON', detail=str(exc)) from exc
    if not isinstance(value, dict):
        raise UserError(f'cannot use "{path}": it is not a JSON object')
    return value


def listing(folder: Path) -> str:
    names = sorted(item.name for item in folder.iterdir()) or ["nothing"]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def read_header(path: Path) -> Header:
    """The header of a safetensors file: https://github.com/huggingface/safetensors#format.  Raises ValueError."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(_LENGTH_BYTES)
            length = int.from_bytes(raw, "little")
            if len(raw) < _LENGTH_BYTES or not 2 <= length <= _MAX_HEADER_BYTES:
                raise ValueError("it is not a safetensors file")
            parts = msgspec.json.decode(stream.read(length), type=dict[str, msgspec.Raw])
            parts.pop("__metadata__", None)
            rows = {name: msgspec.json.decode(part, type=_Row) for name, part in parts.items()}
    except (ValueError, msgspec.MsgspecError) as exc:
        raise ValueError(f"the header of {path} could not be read: {exc}") from exc
    tensors = tuple(StoredTensor(name, row.dtype, row.shape) for name, row in rows.items())
    return Header(tensors, sum(row.data_offsets[1] - row.data_offsets[0] for row in rows.values()))
