"""ModelScope as a source of models: `ms://org/name`, by plain HTTP, without its package.

MODELSCOPE_DOMAIN names another site, MODELSCOPE_API_TOKEN is for private models; the token goes to that site only.
The paths and fields are those of the site's own client:
https://github.com/modelscope/modelscope/blob/master/modelscope/hub/api.py
"""

from __future__ import annotations

import hashlib
import http.client
import os
from typing import Annotated
from urllib.parse import urlencode

import msgspec

from penstock.errors import PenstockError, UserError
from penstock.models import http_files
from penstock.models.part_file import PartFile
from penstock.models.sources import Listing, RemoteFile, Source

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
    data = http_files.read(_opened(source, f"repo/files?{urlencode(query)}"), _MOST_LISTING_BYTES)
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


def fetch_file(listing: Listing, name: str, part: PartFile) -> None:
    """Write the bytes of a file to `part`, after those that are in it; a site without ranges sends it whole.

    Raises UserError and PenstockError as `resolve`, and OSError for the disk."""
    query = urlencode({"Revision": listing.source.revision or _MAIN, "FilePath": name})
    answer = _opened(listing.source, f"repo?{query}", part.n_bytes)
    http_files.receive(answer, part, listing.files[name].size)


def endpoint() -> str:
    return f"https://{os.environ.get('MODELSCOPE_DOMAIN') or 'www.modelscope.cn'}"


def _opened(source: Source, path: str, begin: int = 0) -> http_files.Answer:
    url, token = f"{endpoint()}/api/v1/models/{source.name}/{path}", os.environ.get("MODELSCOPE_API_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    front = f'could not fetch "{source}" from {endpoint()}'
    try:
        return http_files.follow(http_files.get(f'"{source}"', url, headers, begin))
    except http_files.StatusError as exc:
        if exc.status == http.client.NOT_FOUND:
            raise UserError(f"{front}: no such model or revision", hint="Check the name and the revision.") from exc
        if exc.status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
            hint = f"Set MODELSCOPE_API_TOKEN; accept the licence on {endpoint()}/models/{source.name} if it has one."
            raise UserError(f"{front}: it requires a token with access", hint=hint) from exc
        is_retryable = exc.status >= http.client.TOO_MANY_REQUESTS
        raise PenstockError(f"{front}: HTTP {exc.status}", is_retryable=is_retryable) from exc
