"""Reads the model hub through `huggingface_hub`, and knows where that package keeps what it fetched.

Planning reads config.json, the index and safetensors headers (range requests), never weights or code. HF_ENDPOINT (a
mirror), HF_TOKEN, HF_HUB_OFFLINE, HF_HUB_CACHE and the proxies of the environment count."""

from __future__ import annotations

import errno
import fnmatch
import json
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from penstock import __version__
from penstock.errors import PenstockError, UserError
from penstock.models import Header, StoredTensor

_Answer = TypeVar("_Answer")
_TIMEOUT_S = 10.0
_N_TRIES = 2
_N_AT_ONCE = 8
# Of a disk, not of a network: some HTTP libraries raise OSError for both.
_OF_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
# Of huggingface_hub's cache: models--Qwen--Qwen3-0.6B/snapshots/c1899de289a04d12100db370d81485cdf75e47ca/...
_IN_CACHE = re.compile(r"(.*)/(models--[^/]+)/snapshots/([^/]+)(?:/(.+))?\Z")
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_ID = re.compile(rf"({_NAME}/{_NAME})(?:@([A-Za-z0-9._-]+))?(?::([A-Za-z0-9._-]+)|/(.+\.(?:gguf|GGUF)))?\Z")
# The values that huggingface_hub takes as true (`huggingface_hub/constants.py`).
_TRUE = ("1", "ON", "YES", "TRUE")
# `x-error-code` of an answer -> class of huggingface_hub.errors.
_FAMILIES = {"GatedRepo": "GatedRepoError", "RepoNotFound": "RepositoryNotFoundError"}
# Class of huggingface_hub.errors, or HTTP status -> what is wrong, and the fix.
_REASONS: dict[str | int, tuple[str, str]] = {
    "GatedRepoError": ("it is gated", "Accept the licence on its hub page, then set HF_TOKEN."),
    "RepositoryNotFoundError": (
        "no such repository, or a private one",
        "Check the name; a private model needs HF_TOKEN.",
    ),
    "LocalEntryNotFoundError": (
        "the hub was not reached",
        "This machine does not reach the hub: copy the model's folder here, give its path.",
    ),
    401: ("the hub requires a token", "Check the name; a gated or private model needs HF_TOKEN."),
    403: ("the hub refuses this token", "Accept the licence on its hub page with the account of HF_TOKEN."),
    404: ("no such file or revision", "Check the name and the revision."),
    429: ("the hub answers: too many requests", "Set HF_TOKEN, or try again in some minutes."),
}


class InCache(NamedTuple):
    """A path in a hub's cache: the cache's folder, the repository's folder in it, the revision, the path inside."""

    cache: str
    folder: str
    revision: str
    inside: str


class HubId(NamedTuple):
    """A repository, a branch, tag or commit of it, and a GGUF file of it or a word in that file's name."""

    name: str
    revision: str | None
    inside: str | None


class HubError(UserError):
    """`is_missing`: the repository has no such file. `wait_s`: what the hub asks to wait before the next try."""

    def __init__(
        self,
        message: str,
        *,
        detail: str,
        hint: str,
        status: int | None,
        is_missing: bool = False,
        wait_s: float | None = None,
    ) -> None:
        super().__init__(message, detail=detail, hint=hint, is_retryable=status is None or status >= 429)
        self.status, self.is_missing, self.wait_s = status, is_missing, wait_s


def is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE


def endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def shown_endpoint() -> str:
    """The hub's address for people: without the password of a mirror."""
    return without_password(endpoint())


def without_password(text: str) -> str:
    """Addresses in a text, without user and password. Pure."""
    return re.sub(r"://[^/@\s]*@", "://", text)


def cache() -> Path:
    """The folder where huggingface_hub keeps what it fetched on this machine."""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()


def parse_id(model: str) -> HubId | None:
    """ "org/name", "org/name@revision", "org/name:Q4_K_M", "hf://org/name@revision/file.gguf"; None for any other name.
    A folder here may still have that name. Pure."""
    match = _ID.match(model.removeprefix("hf://"))
    return None if match is None or ".." in model else HubId(match[1], match[2], match[3] or match[4])


def _check_endpoint() -> None:
    """The package reads the address when it is imported, and fails in words of its own.  Raises UserError."""
    try:
        parts = urlsplit(endpoint())
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        is_address = False
    if not is_address:
        raise UserError(
            f'cannot use HF_ENDPOINT "{shown_endpoint()}": it is no address',
            hint="It is the address of the hub or of a mirror, such as https://hub.example.com.",
        )


def is_id(model: str) -> bool:
    """Whether a model's name has the form of a hub id. Pure."""
    return parse_id(model) is not None


def in_cache(path: str) -> InCache | None:
    """The parts of a path in a hub's cache, of this machine or another; None for any other path. Pure."""
    match = _IN_CACHE.match(path)
    return None if match is None else InCache(match[1], match[2], match[3], match[4] or "")


def check_inside(path: Path, folder: Path) -> None:
    """Refuse a link that leads out of the folder, or, in a hub's cache, out of that cache.  Raises ValueError."""
    real = folder.resolve()
    place = in_cache(str(real))
    root = Path(place.cache) if place is not None else real
    if not path.resolve().is_relative_to(root):
        raise ValueError(f"it is a link out of {root}")


def read_json(name: str, path: str, revision: str | None = None) -> tuple[dict[str, Any], str | None]:
    """A JSON file of a repository (its main branch without a revision), and its commit.  Raises HubError."""
    library = _library(name)
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    def fetch() -> tuple[bytes, str | None]:
        headers = build_hf_headers(library_name="penstock", library_version=__version__)
        answer = get_session().get(
            library.hf_hub_url(name, path, revision=revision, endpoint=endpoint()), headers=headers, timeout=_TIMEOUT_S
        )
        hf_raise_for_status(answer)
        return answer.content, answer.headers.get("X-Repo-Commit")

    body, commit = asked(name, fetch)
    try:
        value = json.loads(body)
        if not isinstance(value, dict):
            raise ValueError(f"it is a {type(value).__name__}")
        return value, commit
    except ValueError as exc:
        message = f'cannot use "{path}" of "{name}" on the hub: it is not a JSON object: {exc}'
        hint = "Give a folder with its config.json."
        raise HubError(message, detail=shown_endpoint(), hint=hint, status=200) from exc


def read_headers(name: str, paths: Sequence[str], revision: str | None = None) -> list[Header]:
    """The headers of several safetensors files, eight at once, in the order of `paths`.  Raises HubError."""
    api = _library(name).HfApi(endpoint=endpoint(), library_name="penstock", library_version=__version__)

    def read(path: str) -> Header:
        rows = asked(
            name, lambda: api.parse_safetensors_file_metadata(name, path, revision=revision, timeout=_TIMEOUT_S)
        ).tensors
        tensors = tuple(StoredTensor(key, str(row.dtype), tuple(row.shape)) for key, row in rows.items())
        return Header(tensors, sum(row.data_offsets[1] - row.data_offsets[0] for row in rows.values()))

    with ThreadPoolExecutor(_N_AT_ONCE) as pool:
        return list(pool.map(read, paths))


def list_sizes(name: str, patterns: Sequence[str], revision: str | None = None) -> tuple[str, dict[str, int]]:
    """The commit of a revision, and the sizes of its files that match, in bytes.  Raises HubError."""
    api = _library(name).HfApi(endpoint=endpoint(), library_name="penstock", library_version=__version__)
    facts = asked(name, lambda: api.model_info(name, revision=revision, files_metadata=True))
    files = {file.rfilename: int(file.size or 0) for file in facts.siblings or ()}
    wanted = {path: size for path, size in files.items() if any(fnmatch.fnmatch(path, glob) for glob in patterns)}
    return str(facts.sha), wanted


def list_hashes(name: str, revision: str | None = None) -> tuple[str, dict[str, tuple[int, str | None, str | None]]]:
    """The commit of a revision, and of each of its files bytes, SHA-256 (of an LFS file) or SHA-1 (of a git blob), in
    hexadecimal; a mirror may leave them out.  Raises HubError."""
    api = _library(name).HfApi(endpoint=endpoint(), library_name="penstock", library_version=__version__)
    facts = asked(name, lambda: api.model_info(name, revision=revision, files_metadata=True))
    rows = {}
    for file in facts.siblings or ():
        lfs = file.lfs
        size = lfs.size if lfs is not None else file.size
        rows[str(file.rfilename)] = (int(size or 0), lfs and str(lfs.sha256), None if lfs else file.blob_id)
    return str(facts.sha), rows


def _library(name: str) -> Any:
    """The package, which a host that only ssh reaches may lack.  Raises UserError."""
    _check_endpoint()
    try:
        import huggingface_hub
    except ImportError as exc:
        raise UserError(
            f'cannot fetch model "{name}" on {socket.gethostname()}: huggingface_hub is not installed there',
            hint="pip install huggingface_hub there, or put the model on a file system that every node has.",
        ) from exc
    return huggingface_hub


def asked(name: str, call: Callable[[], _Answer], n_tries: int = _N_TRIES) -> _Answer:
    """The answer of a call of huggingface_hub; a broken hub is asked again.  Raises HubError."""
    for left in reversed(range(n_tries)):
        try:
            return call()
        except PenstockError:
            raise
        except Exception as exc:  # its HTTP library, and so the family of a lost connection, changes by version
            if isinstance(exc, OSError) and exc.errno in _OF_DISK:
                raise
            error = _explained(name, exc)
            if not left or (error.status is not None and error.status < 500):
                raise error from exc
    raise AssertionError("the last try returns or raises")


def _explained(name: str, exc: Exception) -> HubError:
    families = {kind.__name__ for kind in type(exc).__mro__}
    response = getattr(exc, "response", None)
    status = getattr(response, "status_code", None)
    family: str | int | None = next((word for word in _REASONS if word in families), status)
    is_missing = "EntryNotFoundError" in families or family == 404
    if status is None and family is None:
        unreached, detail = f'could not reach the hub for "{name}": {type(exc).__name__}', _detail(str(exc))
        return HubError(unreached, detail=detail, hint="Check the network, or give a local folder.", status=None)
    return _refusal(name, family, status, is_missing, getattr(response, "headers", None) or {}, str(exc))


def refusal(name: str, status: int, headers: Mapping[str, str], words: str) -> HubError:
    """What an answer of the hub means that is neither a file nor a redirect. `words`: its text; header names are lower
    case. Pure."""
    family = _FAMILIES.get(headers.get("x-error-code") or "", status)
    return _refusal(name, family, status, family == 404, headers, words)


def _refusal(
    name: str, family: str | int | None, status: int | None, is_missing: bool, headers: Mapping[str, str], words: str
) -> HubError:
    why, hint = _REASONS.get(family or 404, (f"HTTP {status}", "Try again later."))
    message, detail = f'could not fetch model "{name}" from the hub: {why}', _detail(words)
    if status == 401 or family in ("GatedRepoError", 403):
        detail = f"The page to visit: {shown_endpoint()}/{name}\n{detail}"
    return HubError(message, detail=detail, hint=hint, status=status, is_missing=is_missing, wait_s=wait_s(headers))


def _detail(words: str) -> str:
    return f"{shown_endpoint()}: {without_password(' '.join(words.split()))[:500]}"


def wait_s(headers: Mapping[str, str]) -> float | None:
    """Seconds in `retry-after: 5`, or in `ratelimit: "api";r=0;t=55`
    (https://www.ietf.org/archive/id/draft-ietf-httpapi-ratelimit-headers-09.html)."""
    lower = {name.lower(): value for name, value in headers.items()}
    match = re.fullmatch(r"\s*(\d{1,6})\s*", lower.get("retry-after", ""))
    match = match or re.search(r";\s*r=0\s*;\s*t=(\d{1,6})", lower.get("ratelimit", ""))
    return float(match[1]) if match else None
