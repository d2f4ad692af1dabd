"""ModelScope as a source of models: `ms://org/name`, by plain HTTP, without its package.

MODELSCOPE_DOMAIN names another site, MODELSCOPE_API_TOKEN is for private models; the token goes to that site only.
The paths and fields are those of the site's own client:
https://github.com/modelscope/modelscope/blob/master/modelscope/hub/api.py
"""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import msgspec

from penstock import __version__
from penstock.errors import PenstockError, UserError
from penstock.models.sources import Listing, RemoteFile, Source

_TIMEOUT_S = 30.0
_PIECE_BYTES = 1 << 20
_MOST_LISTING_BYTES = 64 << 20
_MAIN = "master"


class _Row(msgspec.Struct, frozen=True, rename="pascal"):
    path: str
    type: str = "blob"
    size: int = 0
    sha256: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")] | None = None


class _Files(msgspec.Struct, frozen=True, rename="pascal"):
    files: list[_Row] = []


class _Answer(msgspec.Struct, frozen=True, rename="pascal"):
    data: _Files | None = None
    message: str = ""


def resolve(source: Source) -> Listing:
    """All files of a repository with sizes and hashes; a hash of these stands for the commit. Blocks.

    Raises UserError: no such model, no access; PenstockError when the site was not reached.
    """
    query = {"Revision": source.revision or _MAIN, "Recursive": "true"}
    with _opened(source, f"repo/files?{urlencode(query)}") as answer:
        data = _read(source, answer, _MOST_LISTING_BYTES)
    try:
        listing = msgspec.json.decode(data, type=_Answer)
    except msgspec.MsgspecError as exc:
        raise PenstockError(f'could not fetch "{source}": its list of files cannot be read', detail=str(exc)) from exc
    rows = [row for row in (listing.data.files if listing.data else []) if row.type != "tree"]
    if not rows:
        raise UserError(f'cannot fetch "{source}": it has no files', detail=listing.message or None)
    rows.sort(key=lambda row: row.path)
    digest = hashlib.sha256("".join(f"{row.path}\n{row.size}\n{row.sha256}\n" for row in rows).encode())
    files = {row.path: RemoteFile(row.size, row.sha256 or None) for row in rows}
    return Listing(source, digest.hexdigest()[:40], files)


def fetch_file(listing: Listing, name: str, part: Path, progress: Callable[[int], None]) -> None:
    """Write the bytes of a file to `part`, after those that are in it; a site without ranges sends it whole.

    Raises UserError and PenstockError as `resolve`, and OSError for the disk."""
    source, size = listing.source, listing.files[name].size
    query = urlencode({"Revision": source.revision or _MAIN, "FilePath": name})
    with part.open("ab") as stream:
        begin = stream.tell()
        if begin >= size:
            return
        with _opened(source, f"repo?{query}", begin) as answer:
            if begin and answer.status != http.client.PARTIAL_CONTENT:
                stream.truncate(0)
                progress(-begin)
            while data := _read(source, answer, _PIECE_BYTES):
                stream.write(data)
                stream.flush()  # a kill loses nothing
                progress(len(data))
        if stream.tell() < size:
            raise PenstockError(
                f'could not fetch "{name}" of "{source}": the connection ended early', is_retryable=True
            )


def endpoint() -> str:
    return f"https://{os.environ.get('MODELSCOPE_DOMAIN') or 'www.modelscope.cn'}"


def _opened(source: Source, path: str, begin: int = 0) -> Any:
    request = urllib.request.Request(f"{endpoint()}/api/v1/models/{source.name}/{path}")
    request.add_header("User-Agent", f"penstock/{__version__}")
    if begin:
        request.add_header("Range", f"bytes={begin}-")
    if token := os.environ.get("MODELSCOPE_API_TOKEN"):
        # Not sent again to the place that an answer redirects to.
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    return _asked(source, lambda: urllib.request.urlopen(request, timeout=_TIMEOUT_S))


def _read(source: Source, answer: Any, n_bytes: int) -> bytes:
    data: bytes = _asked(source, lambda: answer.read(n_bytes))
    return data


def _asked(source: Source, call: Callable[[], Any]) -> Any:
    front = f'could not fetch "{source}" from {endpoint()}'
    try:
        return call()
    except urllib.error.HTTPError as exc:
        exc.close()
        if exc.code == http.client.NOT_FOUND:
            raise UserError(f"{front}: no such model or revision", hint="Check the name.") from exc
        if exc.code in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
            hint = f"Set MODELSCOPE_API_TOKEN; accept the licence on {endpoint()}/models/{source.name} if it has one."
            raise UserError(f"{front}: it requires a token with access", hint=hint) from exc
        is_retryable = exc.code >= http.client.TOO_MANY_REQUESTS
        raise PenstockError(f"{front}: HTTP {exc.code}", is_retryable=is_retryable) from exc
    except (OSError, http.client.HTTPException) as exc:
        raise PenstockError(f"{front}: it was not reached", detail=str(exc)[:300], is_retryable=True) from exc
