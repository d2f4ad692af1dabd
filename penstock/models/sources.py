"""Where a model's files come from, and what they are: names, sizes and hashes, before a byte of them is fetched.

`parse` reads what a user typed, `resolve` asks the source. A new kind of source is one file and a row in each table:
`resolve(source) -> Listing` of all its files, and `fetch_file(listing, name, part)`, which writes the bytes of one file
to a PartFile, after those that are in it already, and raises PenstockError with `is_retryable`. It compares no hash and
renames nothing: models/fetch_files.py does.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib
import re
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from penstock.errors import UserError
from penstock.models import ModelFacts, files, hub
from penstock.models.part_file import PartFile
from penstock.spec.deployment import Deployment
from penstock.text import bare_flag

Kind = Literal["hub", "modelscope", "store", "folder"]
# What resolves a kind of source.
RESOLVERS: dict[Kind, str] = {
    "hub": "penstock.models.sources:list_hub",
    "modelscope": "penstock.models.modelscope:resolve",
    "store": "penstock.models.object_store:resolve",
    "folder": "penstock.models.sources:list_folder",
}
# What fetches one file of it.
FETCHERS: dict[Kind, str] = {
    "hub": "penstock.models.hub_files:fetch_file",
    "folder": "penstock.models.sources:copy_file",
    "modelscope": "penstock.models.modelscope:fetch_file",
    "store": "penstock.models.object_store:fetch_file",
}
_BLOCK_BYTES = 1 << 20
_STORES = ("s3://", "gs://", "az://")
_PAGE = re.compile(r"https?://[^/]+/([\w.-]+/[\w.-]+)")  # of a model on a hub, as a browser shows it
_CONTROL = re.compile(r"[\x00-\x1f\x7f\\]")
# Copies of the weights, or of other programs' forms of them.
_NOT_OURS = ("original/*", "onnx/*", "openvino/*", "coreml/*", "MANIFEST.json", ".*", "*/.*")


class Source(msgspec.Struct, frozen=True):
    """Where a model is. `name`: "org/name" of a hub, the whole URL of a store, an absolute path. `inside`: a GGUF file
    of a repository, a word in its name ("Q4_K_M"), or "gguf" for the usual one."""

    kind: Kind
    name: str
    revision: str | None = None
    inside: str | None = None

    def __str__(self) -> str:
        front = {"hub": "hf://", "modelscope": "ms://"}.get(self.kind, "")
        return f"{front}{self.name}" + (f"@{self.revision}" if self.revision else "")


class Wanted(msgspec.Struct, frozen=True):
    """What a fetch may bring: pickled weights where there are no others, Python files; `commit`: no other version."""

    pickles: bool = False
    code: bool = False
    commit: str | None = None


PLAIN = Wanted()  # weights that run no code, in the version that the source has now


class RemoteFile(msgspec.Struct, frozen=True):
    """`sha256` or `git_sha1` (of a git blob), hexadecimal, where the source tells one. `url`: where the bytes are, for
    sources whose fetcher needs it."""

    size: int
    sha256: str | None = None
    git_sha1: str | None = None
    url: str | None = None


class Listing(msgspec.Struct, frozen=True):
    """What a source has: `commit` names exactly these bytes (a commit, or "" where the source has no versions)."""

    source: Source
    commit: str
    files: dict[str, RemoteFile]

    @property
    def n_bytes(self) -> int:
        return sum(file.size for file in self.files.values())


def parse(text: str, revision: str | None = None) -> Source:
    """ "org/name", "hf://org/name@v1", "ms://org/name", "s3://bucket/prefix", "file:///a", "./folder" -> Source.

    A folder that exists wins over a hub id of the same form. `revision` overrules the one in `text`. Raises UserError.
    """
    if text.startswith(_STORES):
        return Source("store", text.rstrip("/"), revision)
    path = Path(text.removeprefix("file://")).expanduser()
    if path.is_dir() or text.startswith(("file://", "/", "./", "../", "~")):
        if not path.exists():
            raise UserError(f'cannot fetch model "{text}": no such folder', hint="Check the path.")
        return Source("folder", str(path.resolve()))
    kind: Kind = "modelscope" if text.startswith("ms://") else "hub"
    repository = hub.parse_id(text.removeprefix("ms://"))
    if repository is None:
        page = _PAGE.match(text)
        raise UserError(
            f'cannot fetch model "{text}": it is no model\'s name',
            hint=f"Give its name: {page[1]}."
            if page
            else "A hub id (org/name, hf://org/name@revision), ms://org/name, s3:// gs:// az://, or a folder.",
        )
    return Source(kind, repository.name, revision or repository.revision, repository.inside)


def of_deployment(deployment: Deployment) -> Source | None:
    """Where a deployment's model is fetched from; None for the bundled one and for a folder or file of this machine."""
    if not is_remote(deployment.model):
        return None
    source = parse(deployment.model)
    wants_gguf = deployment.engine.kind == "llamacpp" or source.name.lower().endswith("gguf")
    return msgspec.structs.replace(source, inside=source.inside or ("gguf" if wants_gguf else None))


def as_planned(model: ModelFacts) -> tuple[Source, str | None]:
    """Where a planned model comes from, in the version that its path names, and the commit where the source has no
    versions to ask for."""
    source, place = parse(model.reference), hub.in_cache(model.path)
    if source.kind == "hub" and place is not None:
        return msgspec.structs.replace(source, revision=place.revision, inside=place.inside or None), None
    commit, inside = _version(model)
    return msgspec.structs.replace(source, inside=inside or None), commit


def _version(model: ModelFacts) -> tuple[str, str]:
    """The folder of a path like .../s3--bucket--name/COMMIT/file.gguf, which names the version, and what follows."""
    path = Path(model.path)
    folder = path if model.form != "gguf" else next(p for p in path.parents if "--" in p.parent.name)
    return folder.name, "" if folder == path else str(path.relative_to(folder))


def is_remote(model: str) -> bool:
    """Whether a model is fetched: a hub id that no folder here has as its name, or a URL."""
    return model.startswith((*_STORES, "ms://")) or (hub.is_id(model) and not Path(model).exists())


def runs_code(flags: Mapping[str, object]) -> bool:
    """Whether an engine with these flags runs Python files of the model's author."""
    return any(bare_flag(name) == "trust-remote-code" and value is True for name, value in flags.items())


def resolve(source: Source, allow_pickle: bool = False, with_code: bool = False) -> Listing:
    """The commit and the files that an engine needs, with sizes and hashes. Asks the source; blocks.

    `with_code`: Python files of the repository too.  Raises UserError: no such model, gated, an unsafe file name, only
    pickled weights.
    """
    module, function = RESOLVERS[source.kind].split(":")
    resolver: Callable[[Source], Listing] = getattr(importlib.import_module(module), function)
    listing = resolver(source)
    check_names(str(source), listing.files)
    names = set(choose(str(source), tuple(listing.files), source.inside, allow_pickle, with_code))
    return msgspec.structs.replace(listing, files={n: file for n, file in sorted(listing.files.items()) if n in names})


def check_names(what: str, names: Collection[str]) -> None:
    """Refuse names that would lead out of a folder, or that a terminal would obey.  Raises UserError. Pure."""
    for name in names:
        parts = name.split("/")
        if not name or len(name) > 500 or _CONTROL.search(name) or {"", ".", ".."} & set(parts) or ":" in parts[0]:
            raise UserError(f'cannot fetch "{what}": it has a file with the unsafe name {name[:100]!r}')


def choose(
    what: str, names: Sequence[str], inside: str | None = None, allow_pickle: bool = False, with_code: bool = False
) -> list[str]:
    """The files that an engine reads, of all those of a model: its weights once, and what goes with them. Pure.

    Safetensors win over GGUF, which win over pickled weights.  Raises UserError without weights, and for pickles.
    """
    usable = [name for name in names if not _matches(name, _NOT_OURS)]
    texts = [name for name in usable if _matches(name, files.PATTERNS["safetensors"][1:])]
    texts += [name for name in usable if with_code and name.endswith(".py")]
    if inside == "gguf":
        weights = files.choose_gguf(usable)
    elif inside is not None:
        wanted = inside.replace("-00001-of-", "-*-of-").lower()
        weights = [n for n in usable if n.lower().endswith(".gguf") and fnmatch.fnmatch(n.lower(), wanted)]
        weights = weights or [n for n in usable if n.lower().endswith(".gguf") and wanted in n.lower()]
    elif tensors := [name for name in usable if name.endswith(".safetensors")]:
        top = [name for name in tensors if "/" not in name] or tensors
        # As vLLM filters them (`default_loader.py`): Mistral's consolidated.* repeats the others, where both are.
        weights = [name for name in top if not name.startswith("consolidated")] or top
    else:
        weights = files.choose_gguf(usable)
    pickles = [name for name in usable if name.endswith(files.PICKLES)]
    if not weights and pickles and allow_pickle:
        weights = pickles
    if not weights:
        raise _no_weights(what, usable, inside, pickles)
    return sorted({*weights, *texts})


def _no_weights(what: str, names: Sequence[str], inside: str | None, pickles: Sequence[str]) -> UserError:
    ggufs = sorted(name for name in names if name.lower().endswith(".gguf"))
    if inside not in (None, "gguf"):
        shown = ", ".join(ggufs[:12]) + (f" and {len(ggufs) - 12} more" if len(ggufs) > 12 else "")
        return UserError(f'cannot fetch "{what}": it has no GGUF file "{inside}"', detail=f"It has {shown or 'none'}.")
    message = f'cannot fetch "{what}": it has no file of weights that an engine loads'
    if not pickles:
        shown = ", ".join(sorted(names)[:6]) or "no file of a model"
        return UserError(message, detail=f"It has {shown}.", hint="Engines load *.safetensors, or *.gguf.")
    return UserError(
        message,
        detail=f"Its weights are pickled ({pickles[0]}), which can run code when they are loaded.",
        hint="Choose a repository with safetensors, or set cache.allow_pickle: true if you trust its author.",
    )


def list_hub(source: Source) -> Listing:
    """The files of a hub's repository, and the commit of `revision` (the main branch without one).  Raises HubError."""
    check_names(str(source), [source.revision or "main"])
    commit, rows = hub.list_hashes(source.name, source.revision or "main")
    check_names(str(source), [commit.replace("/", "\\")])  # it becomes the name of a folder
    return Listing(source, commit, {name: RemoteFile(*row) for name, row in rows.items()})


def list_folder(source: Source) -> Listing:
    """The files below a folder of this machine; its commit stands for their names, sizes and times.  Raises UserError
    for a folder that is not there, and for links that leave it."""
    folder = Path(source.name)
    if not folder.exists():
        raise UserError(f'cannot use folder "{folder}": it is not on {socket.gethostname()}')
    if folder.is_file():
        return _listed(source, {folder.name: folder})
    paths = [path for path in folder.rglob("*") if path.is_file()]
    for path in paths:
        try:
            hub.check_inside(path, folder)
        except ValueError as exc:
            raise UserError(f'cannot use "{path}": {exc}') from exc
    return _listed(source, {str(path.relative_to(folder)): path for path in paths})


def _listed(source: Source, paths: Mapping[str, Path]) -> Listing:
    facts = {name: path.stat() for name, path in sorted(paths.items())}
    # Files that penstock itself writes there change nothing.
    lines = [f"{n} {f.st_size} {f.st_mtime_ns}" for n, f in facts.items() if not _matches(n, _NOT_OURS)]
    commit = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    return Listing(source, commit, {name: RemoteFile(f.st_size, url=str(paths[name])) for name, f in facts.items()})


def copy_file(listing: Listing, name: str, part: PartFile) -> None:
    """Write the bytes of a file of this machine to `part`, after those that are in it.  Raises OSError."""
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    with Path(listing.files[name].url or "").open("rb", buffering=0) as stream:
        stream.seek(part.n_bytes)
        while n_bytes := stream.readinto(buffer):
            part.write(buffer[:n_bytes])


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
