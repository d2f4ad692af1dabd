"""What planning must know of a model, from whatever names it: a folder, a catalogue name, a hub id. Never remote code.

`python -m penstock.models.facts FOLDER` prints what a folder of this machine holds, as JSON, to plan on another.

Of a hub repository only config.json, the index and the headers are read. They are kept under the penstock home by
commit: a second plan asks for config.json alone. Without a network that copy is used, or the hub's own cache on this
machine, or the catalogue's copy, with a note."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock import paths
from penstock.errors import UserError, not_modelled
from penstock.models import (
    Facts,
    Header,
    ModelFacts,
    StoredTensor,
    catalog,
    demo,
    fetch,
    files,
    gguf,
    hub,
    manifest,
    sources,
)
from penstock.models.fetch_files import FilesFetch, Layout
from penstock.models.hub import HubError
from penstock.paths import write_atomically
from penstock.spec.deployment import DEMO_MODEL

# Where modelopt keeps its format in checkpoints whose config.json has no quantization_config; vLLM reads it there too.
_MODELOPT = "hf_quant_config.json"
_SINGLE = "model.safetensors"
_OLD_INDEX = "pytorch_model.bin.index.json"
_MOST_NAMES = 5


FactsByForm = dict[str, tuple[Facts, ModelFacts]]


class Kept(msgspec.Struct, frozen=True):
    commit: str | None
    facts: Facts


def read(reference: str) -> Facts:
    """The facts of the model that `reference` names.  Raises UserError; may ask the hub (seconds, see `hub`)."""
    if reference == DEMO_MODEL:
        return read_folder(files.BUNDLED, reference)
    path = Path(reference.removeprefix("file://")).expanduser()
    if path.is_file() and path.name == "config.json":
        path = path.parent
    if path.is_dir():
        return read_folder(path, reference)
    if path.is_file():
        raise _no_config(reference)
    looks_local = reference.startswith(("/", "./", "../", "~"))
    if not looks_local and "/" not in reference and catalog.find(reference):
        return _from_catalog(reference)
    if sources.is_remote(reference):
        source = sources.parse(reference)
        if source.inside is not None:
            raise _no_config(reference)
        facts = _from_hub(source.name, source.revision) if source.kind == "hub" else _from_listing(source)[0]
        return msgspec.structs.replace(facts, reference=reference)
    hint = "Check the path, or give a hub id such as Qwen/Qwen3-0.6B."
    if "/" not in reference:
        hint = f"{_suggestion(reference) or hint} `penstock plan --list` lists the catalogue."
    raise UserError(
        f'cannot use model "{reference}": no such folder' + ("" if looks_local else " and not in the catalogue"),
        detail="A model is a folder with a config.json, a catalogue name (llama-3.1-70b), or a hub id (name/name).",
        hint=hint,
    )


def _no_config(reference: str) -> UserError:
    return UserError(
        f'cannot plan model file "{reference}"',
        detail="Planning reads the config.json of a model that vLLM serves; a GGUF file has none.",
        hint="Give the folder that has config.json, or a hub id.",
    )


def read_folder(folder: Path, reference: str) -> Facts:
    """The facts in a folder: config.json, and the headers of its safetensors files when all are there."""
    config = files.read_object(folder / "config.json")
    if (folder / _MODELOPT).is_file():
        config = _with_modelopt(config, files.read_object(folder / _MODELOPT))
    notes: list[str] = []
    tensors, n_bytes = None, None
    index = files.read_object(folder / files.INDEX) if (folder / files.INDEX).is_file() else None
    names = files.wanted_shards(folder)
    missing = [name for name in names if not (folder / name).is_file()]
    if names and not missing:
        try:
            tensors, n_bytes = _joined([files.read_header(folder / name) for name in names])
        except (OSError, ValueError) as exc:
            notes.append(f"{exc}: the weights were counted from the config (is it a Git LFS pointer?)")
    elif len(missing) < len(names):  # a folder with none of them is for planning; with some, a broken download
        notes.append(f"{len(missing)} of {len(names)} safetensors files named by the index are not in {folder}")
    if n_bytes is None and index is not None:
        n_bytes = _total_size(index)
    what = f"{len(names)} safetensors headers" if tensors else files.INDEX if n_bytes else "config.json alone"
    return Facts(reference, config, f"{folder}: {what}", tensors, n_bytes, notes=tuple(notes))


def read_files(path: Path, reference: str, form: str) -> tuple[Facts, ModelFacts]:
    """The facts in the files of one form that an engine will load, and the record of them in its plan.
    Raises UserError for a folder that holds no such model."""
    if form == "gguf":
        if path == files.BUNDLED:  # its file is written on the node that loads it
            facts = Facts(reference, gguf.read_config(demo.HEAD), f"{demo.HEAD}: a header")
            return facts, _record(facts, path, "gguf", [path / name for name in files.wanted_shards(path)])
        parts = files.gguf_parts(path)
        if not parts:
            raise UserError(
                f'cannot use model folder "{path}": no *.gguf in it',
                detail=f"It holds {files.listing(path)}. The embedded engine (llamacpp) loads GGUF files only.",
                hint="Use --engine vllm, or a folder with a GGUF file.",
            )
        facts = Facts(reference, gguf.read_config(parts[0]), f"{parts[0]}: its header")
        return facts, _record(facts, parts[0], "gguf", parts)
    if path.is_file():
        raise UserError(
            f'cannot use model file "{path}": not a folder with config.json and *.safetensors',
            hint="Use --engine llamacpp for a GGUF file.",
        )
    facts = read_folder(path, reference)
    shards = [path / name for name in files.wanted_shards(path) if (path / name).is_file()]
    return facts, _record(facts, path, "safetensors" if shards else "none", shards or files.pickles(path))


def _from_listing(source: sources.Source) -> tuple[Facts, sources.Listing]:
    """The facts of a source that is no hub, by config.json and the sizes of its files.  Raises PenstockError."""
    folder = fetch.kept(source)
    if folder is not None:
        facts = manifest.read(folder)
        assert facts is not None, "what is kept has a manifest"
        return read_folder(folder, str(source)), sources.Listing(source, facts.revision, {})
    listing = sources.resolve(source)
    names = [name for name in (files.CONFIG, files.INDEX, _MODELOPT) if name in listing.files]
    if files.CONFIG not in names:
        raise _no_config(str(source))
    slug = source.name.replace("://", "--").replace("/", "--")
    folder = paths.home() / "cache" / "facts" / f"{source.kind}--{slug}" / listing.commit
    texts = msgspec.structs.replace(listing, files={name: listing.files[name] for name in names})
    FilesFetch(texts, Layout(folder)).run(lambda _: None)
    n_bytes = sum(file.size for name, file in listing.files.items() if name.endswith(".safetensors"))
    config = read_folder(folder, str(source))
    words = f"{source}: config.json, and the sizes of its files"
    return msgspec.structs.replace(config, source=words, index_bytes=n_bytes or None, notes=()), listing


def read_remote(
    reference: str, cache: Path | None, takes_main: bool = False, from_catalog: bool = False, allow_pickle: bool = False
) -> FactsByForm | None:
    """The facts of a model that is fetched, without its weights, at the path that a fetch into `cache` would have:
    nodes read the source and its version from it. None where only a fetch says all (GGUF).

    Of a hub's: with `takes_main` what this machine knows without network is enough, and the revision may be "main";
    with `from_catalog` the hub is asked only for a model that the catalogue does not have.  Raises PenstockError, also
    for a repository that a fetch would refuse: of pickled weights, without `allow_pickle`."""
    source = sources.parse(reference)
    if source.inside is not None:
        return None
    if source.kind != "hub":
        whole, listing = _from_listing(source)
        record = _record(whole, fetch.folder_of(listing, None, cache), "safetensors", ())
        return {"safetensors": (whole, msgspec.structs.replace(record, weights_bytes=whole.index_bytes or 0))}
    is_known = from_catalog and source.revision is None and catalog.find(source.name) is not None
    try:
        whole = _from_catalog(reference) if is_known else read(reference)
    except HubError as error:
        if error.is_missing:  # no config.json
            return None
        raise
    if not whole.tensors and not is_known and not hub.is_offline():
        with contextlib.suppress(HubError):  # what cannot be asked is left to the fetch
            sources.resolve(source, allow_pickle)
    kept = _read_kept(source.name, source.revision)
    commit = kept.commit if kept is not None else None
    if not takes_main and (not whole.tensors or commit is None):
        return None
    listing = sources.Listing(source, commit or source.revision or "main", {})
    record = _record(whole, fetch.folder_of(listing, None, cache), "safetensors", ())
    return {"safetensors": (whole, msgspec.structs.replace(record, weights_bytes=whole.index_bytes or 0))}


def _record(
    facts: Facts, path: Path, form: Literal["safetensors", "gguf", "none"], weights: Sequence[Path]
) -> ModelFacts:
    # Multimodal configs keep the language model's numbers one level down.
    config = facts.config.get("text_config")
    text = config if isinstance(config, dict) else facts.config
    numbers = {key: value for key, value in text.items() if isinstance(value, int)}
    n_heads, hidden = numbers.get("num_attention_heads", 0), numbers.get("hidden_size", 0)
    return ModelFacts(
        reference=facts.reference,
        path=str(path),
        form=form,
        architecture=str((facts.config.get("architectures") or ["unknown"])[0]),
        weights_bytes=sum(file.stat().st_size for file in weights),
        n_shards=len(weights),
        n_layers=numbers.get("num_hidden_layers", 0),
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=numbers.get("num_key_value_heads", 0) or n_heads,
        head_dim=numbers.get("head_dim", 0) or (hidden // n_heads if n_heads else 0),
        vocab=numbers.get("vocab_size", 0),
        max_position=numbers.get("max_position_embeddings", 0) or 4096,
    )


def _with_modelopt(config: dict[str, Any], own: Mapping[str, Any] | None) -> dict[str, Any]:
    if not own or config.get("quantization_config"):
        return config
    return {**config, "quantization_config": {"quant_method": "modelopt", **own}}


def _total_size(index: Mapping[str, Any]) -> int | None:
    metadata = index.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return int(size) if isinstance(size, int | float) and size > 0 else None


def _joined(headers: Sequence[Header]) -> tuple[tuple[StoredTensor, ...], int]:
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    return tensors, sum(header.n_bytes for header in headers)


def _from_catalog(reference: str) -> Facts:
    """The catalogue's copy of a config.json, and the published bytes of its weights when they are known exactly."""
    name = catalog.find(reference)
    assert name is not None, "the caller has looked"
    row = catalog.model(name)
    exact = row.weight_bytes if row.weight_bytes_kind == "exact" else None
    notes = [] if row.config_kind == "verbatim" else [f"the catalogue's config.json is not the hub's own: {row.source}"]
    if row.note:
        notes.append(f"catalogue: {row.note}")
    if reference.lower() not in (name, row.hf_id.lower()):
        notes.append(f"taken for {row.hf_id}, with the same layers; its context may differ: --max-model-len sets it")
    source = f"the catalogue's copy of {row.hf_id}"
    config = _with_modelopt(catalog.model_config(name), catalog.model_config(name, _MODELOPT))
    if row.quant_method and not config.get("quantization_config"):
        raise not_modelled("model", name, f"the catalogue does not have the format of its {row.quant_method} weights")
    hub_id = reference if "/" in reference else row.hf_id
    return Facts(reference, config, source, None, exact, hub_id, tuple(notes))


def _from_hub(name: str, revision: str | None = None) -> Facts:
    """The facts of a hub repository. Asks for config.json each time, for the rest once a commit.  Raises UserError."""
    if hub.is_offline():
        if (facts := _without_network(name, revision, "HF_HUB_OFFLINE is set")) is not None:
            return facts
        raise UserError(
            f'cannot fetch model "{name}": HF_HUB_OFFLINE is set, and nothing of it is kept on this machine',
            hint=f"Unset HF_HUB_OFFLINE, or give a folder with its config.json. {_suggestion(name)}".rstrip(),
        )
    try:
        config, commit = hub.read_json(name, files.CONFIG, revision)
    except HubError as error:
        if (facts := _without_network(name, revision, error.message)) is not None:
            return facts
        error.hint = f"{error.hint} {_suggestion(name)}".rstrip()
        raise
    kept = _read_kept(name, revision)
    if kept is not None and commit is not None and kept.commit == commit:
        return kept.facts
    facts, is_whole = _fetch(name, revision, config)
    if is_whole and commit is not None:
        _write_kept(name, revision, Kept(commit, facts))
    return facts


def _suggestion(name: str) -> str:
    names = catalog.suggestions(name)
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"Did you mean {', '.join(names[:_MOST_NAMES])}{more}?" if names else ""


def _fetch(name: str, revision: str | None, config: dict[str, Any]) -> tuple[Facts, bool]:
    """Facts from the network, and whether they are whole (nothing failed that may work next time)."""
    where = f"{name} on {hub.shown_endpoint()}"
    n_bytes, notes, is_whole = None, [], True
    try:
        if not config.get("quantization_config"):
            config = _with_modelopt(config, _optional(name, _MODELOPT, revision))
        index = _optional(name, files.INDEX, revision)
        n_bytes = None if index is None else _total_size(index)
        shards = [_SINGLE] if index is None else files.shards_of(index)
        if shards:
            tensors, n_bytes = _joined(hub.read_headers(name, shards, revision))
            return Facts(name, config, f"{where}: {len(shards)} safetensors headers", tensors, n_bytes, name), True
    except HubError as error:
        is_whole = error.is_missing
        if not is_whole:
            notes.append(f"the safetensors headers could not be read ({error.message}): the config alone was counted")
    if is_whole and n_bytes is None:
        with contextlib.suppress(HubError):  # only a cross-check: weights in the old format have no headers
            n_bytes = _total_size(_optional(name, _OLD_INDEX, revision) or {})
    what = "index" if n_bytes else "config.json alone"
    return Facts(name, config, f"{where}: {what}", None, n_bytes, name, tuple(notes)), is_whole


def _optional(name: str, path: str, revision: str | None) -> dict[str, Any] | None:
    try:
        return hub.read_json(name, path, revision)[0]
    except HubError as error:
        if error.is_missing:
            return None
        raise


def _without_network(name: str, revision: str | None, why: str) -> Facts | None:
    """What this machine has of a repository: our cache, else the hub's own cache, else the catalogue's copy."""
    kept, snapshot = _read_kept(name, revision), fetch.found(sources.Source("hub", name, revision))
    if kept is not None:
        facts, source = kept.facts, f"what an earlier plan read of {name}"
    elif snapshot is not None and (snapshot / "config.json").is_file():
        facts = msgspec.structs.replace(read_folder(snapshot, name), hub_id=name)
        source = f"the hub's cache in {snapshot}"
    elif revision is None and catalog.find(name):
        facts = _from_catalog(name)
        source = facts.source
    else:
        return None
    return msgspec.structs.replace(facts, notes=(f"{why}; using {source}", *facts.notes))


def _kept_path(name: str, revision: str | None) -> Path:
    file = name.replace("/", "--") + (f"@{revision}" if revision else "")
    return paths.home() / "cache" / "facts" / f"{file}.json"


def _read_kept(name: str, revision: str | None) -> Kept | None:
    try:
        return msgspec.json.decode(_kept_path(name, revision).read_bytes(), type=Kept)
    except (OSError, msgspec.DecodeError):  # absent, or written by another version: it is read anew
        return None


def _write_kept(name: str, revision: str | None, kept: Kept) -> None:
    path = _kept_path(name, revision)
    with contextlib.suppress(OSError):  # a home that cannot be written costs the next plan a few requests, no more
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, msgspec.json.encode(kept))


def main(reference: str) -> int:
    """Print the facts of each form of weights in a folder; the exit code of the process."""
    path = Path(reference).expanduser()
    try:
        if not path.exists():
            raise UserError("no such folder")
        by_form: FactsByForm = {
            form: read_files(path, reference, form) for form in files.forms_of(path) or ("safetensors",)
        }
    except UserError as error:
        sys.stderr.write(f"{error.message}\n")
        return error.exit_code
    sys.stdout.buffer.write(msgspec.json.encode(by_form) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
