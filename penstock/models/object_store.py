"""Object stores as a source of models: S3 and what speaks its protocol, Google Cloud Storage, Azure Blob Storage.

`s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`. A store has no commits: a hash of all names, sizes
and entity tags stands for one, and each request names the tag, so that no file is put together from two versions.
Hashes come from a MANIFEST.json next to the files, which penstock writes, where there is one. Credentials come from the
provider's variables and files, and from the machine's role; never from the URL.
"""

from __future__ import annotations

import collections
import configparser
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from penstock.errors import PenstockError, UserError
from penstock.models import manifest
from penstock.models.part_file import PartFile
from penstock.models.sources import Listing, RemoteFile, Source

# Of one file, next to the eight files that are fetched at once: at most 256 MiB of memory together.
_N_RANGES, _RANGE_BYTES = 4, 8 << 20
_MAX_MANIFEST_BYTES = 16 << 20
# The fetch tries again itself, and says why it waits.
_RETRY = {"max_retries": 2, "retry_timeout": timedelta(seconds=60)}
_TIMEOUTS = {"connect_timeout": "10s", "timeout": "300s"}
_URL = re.compile(r"(s3|gs|az)://([A-Za-z0-9][A-Za-z0-9._-]*)(?:/([^?#]+))?\Z")
_CREDENTIALS = {
    "s3": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; if it is public: AWS_SKIP_SIGNATURE=true.",
    "gs": "Run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS.",
    "az": "Set AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN.",
}
_METADATA_SERVICE = ("169.254.169.254", "metadata.google.internal")  # asked when nothing else has credentials


class _Entry(msgspec.Struct, frozen=True):
    size: int
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class _Manifest(msgspec.Struct, frozen=True):
    files: dict[str, _Entry]


class _Place(NamedTuple):
    scheme: str
    bucket: str
    prefix: str | None


def resolve(source: Source) -> Listing:
    """All files below a prefix, with their sizes, tags, and hashes where a manifest has them. Blocks.

    Raises UserError: no such place, no access, no `obstore`, a manifest that the files do not fit; PenstockError when
    the store was not reached.
    """
    store = _store(source)
    found = {str(row["path"]): row for row in _asked(source, lambda: [row for rows in store.list() for row in rows])}
    if not found:
        raise UserError(f'cannot fetch "{source}": there is nothing', hint="Check the bucket and the path.")
    known = _known_hashes(source, store, found)
    files, digest = {}, hashlib.sha256()
    for name, row in sorted(found.items()):
        digest.update(f"{name}\n{row['size']}\n{row['e_tag']}\n".encode())
        if name != manifest.NAME:
            # No tag has a "#".
            files[name] = RemoteFile(
                int(row["size"]), known.get(name), url=f"{source.name}/{name}#{row['e_tag'] or ''}"
            )
    return Listing(source, digest.hexdigest()[:40], files)


def fetch_file(listing: Listing, name: str, part: PartFile) -> None:
    """Write the bytes of an object to `part`, after those that are in it; ranges of it are fetched in parallel.

    Raises UserError and PenstockError as `resolve`, and when the object was changed; OSError for the disk."""
    source, file = listing.source, listing.files[name]
    store, tag = _store(source), (file.url or "").rpartition("#")[2] or None
    for data in _pieces(source, store, name, tag, range(part.n_bytes, file.size, _RANGE_BYTES), file.size):
        part.write(data)


def _pieces(source: Source, store: Any, name: str, tag: str | None, starts: range, end: int) -> Iterator[memoryview]:
    """The ranges of an object in their order, some of them ahead."""
    import obstore

    def read(start: int) -> memoryview:
        options = {"range": (start, min(start + _RANGE_BYTES, end)), "if_match": tag}
        answer = _asked(source, lambda: obstore.get(store, name, options=options).bytes())
        return memoryview(answer)

    waiting: collections.deque[Future[memoryview]] = collections.deque()
    pool = ThreadPoolExecutor(_N_RANGES)
    try:
        for start in starts:
            waiting.append(pool.submit(read, start))
            if len(waiting) == _N_RANGES:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _known_hashes(source: Source, store: Any, found: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 by name, from the manifest next to the files.  Raises UserError where sizes differ, or files lack."""
    import obstore

    row = found.get(manifest.NAME)
    if row is None or row["size"] > _MAX_MANIFEST_BYTES:
        return {}
    data = bytes(_asked(source, lambda: obstore.get(store, manifest.NAME).bytes()))
    try:
        files = msgspec.json.decode(data, type=_Manifest).files
    except msgspec.MsgspecError:  # another program's file of that name
        return {}
    wrong = [name for name, entry in files.items() if name not in found or found[name]["size"] != entry.size]
    if wrong:
        raise UserError(
            f'cannot fetch "{source}": {len(wrong)} of its files do not fit its {manifest.NAME}',
            detail=f"Missing or of another size: {', '.join(wrong[:3])}.",
            hint=f"Its upload may not be complete; upload it again, {manifest.NAME} last.",
        )
    return {name: entry.sha256 for name, entry in files.items()}


def _store(source: Source) -> Any:
    place = _place(source)
    try:
        from obstore import store as stores
    except ImportError as exc:
        raise UserError(
            f'cannot fetch "{source}": the package obstore is not installed', hint='pip install "penstock[objects]"'
        ) from exc
    options: dict[str, Any] = {"prefix": place.prefix, "retry_config": _RETRY, "client_options": dict(_TIMEOUTS)}
    if place.scheme == "gs":
        return _asked(source, lambda: stores.GCSStore(place.bucket, **options))
    if place.scheme == "az":
        if not (os.environ.get("AZURE_STORAGE_ACCOUNT_NAME") or os.environ.get("AZURE_STORAGE_CONNECTION_STRING")):
            raise UserError(f'cannot fetch "{source}": no storage account is named', hint=_CREDENTIALS["az"])
        return _asked(source, lambda: stores.AzureStore(place.bucket, **options))
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    options["client_options"]["allow_http"] = endpoint.startswith("http://")
    return _asked(source, lambda: stores.S3Store(place.bucket, **options, **_aws_profile()))


def _place(source: Source) -> _Place:
    match = _URL.match(source.name)
    if match is None or ".." in source.name.split("/"):
        shown = re.sub(r"//[^/]*@", "//...@", source.name.partition("?")[0])  # it may hold a secret
        raise UserError(
            f'cannot fetch "{shown}": it is no place in an object store',
            hint="s3://BUCKET/PATH, gs://BUCKET/PATH or az://CONTAINER/PATH; credentials come from the environment.",
        )
    return _Place(match[1], match[2], match[3])


def _aws_profile() -> dict[str, str]:
    """Keys and region from the files of `aws configure`, which the package does not read. Variables come first.
    https://docs.aws.amazon.com/sdkref/latest/guide/file-format.html"""
    variables = os.environ
    profile = variables.get("AWS_PROFILE") or "default"
    options: dict[str, str] = {}
    rows = _ini(variables.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials", profile)
    if "AWS_ACCESS_KEY_ID" not in variables and "aws_secret_access_key" in rows:
        names = {"aws_access_key_id": "access_key_id", "aws_secret_access_key": "secret_access_key"}
        names["aws_session_token"] = "session_token"
        options = {option: rows[name] for name, option in names.items() if name in rows}
    if not {"AWS_REGION", "AWS_DEFAULT_REGION"} & set(variables):
        section = profile if profile == "default" else f"profile {profile}"
        rows = _ini(variables.get("AWS_CONFIG_FILE") or "~/.aws/config", section)
        options |= {"region": rows["region"]} if "region" in rows else {}
    return options


def _ini(path: str, section: str) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(Path(path).expanduser(), "utf-8")
        return dict(parser[section]) if section in parser else {}
    except (configparser.Error, UnicodeDecodeError):
        return {}


def _asked(source: Source, call: Callable[[], Any]) -> Any:
    """The answer of a call of obstore.  Raises UserError, and PenstockError when another try may help."""
    try:
        return call()
    except Exception as exc:  # the package has built-in errors too
        raise _explained(source, exc) from exc


def _explained(source: Source, exc: Exception) -> PenstockError:
    families = {kind.__name__ for kind in type(exc).__mro__}
    # Requests of some stores carry their signature in the address.
    text = " ".join(str(exc).partition("Debug source:")[0].split())[:500]
    text = re.sub(r"\?[^\s\"')]+", "?...", text)
    scheme = _place(source).scheme
    front = f'could not fetch "{source}"'
    if "FileNotFoundError" in families or "404 Not Found" in text:
        return UserError(f"{front}: no such file or bucket", detail=text, hint="Check the bucket and the path.")
    if "PreconditionError" in families:
        return UserError(f"{front}: a file was changed while it was fetched", detail=text, hint="Start again.")
    if families & {"PermissionDeniedError", "UnauthenticatedError"} or re.search("401 Unauth|403 Forbidden", text):
        return UserError(f"{front}: the store refuses these credentials", detail=text, hint=_CREDENTIALS[scheme])
    if any(name in text for name in _METADATA_SERVICE):
        return UserError(f"{front}: no credentials were found", detail=text, hint=_CREDENTIALS[scheme])
    if "PermanentRedirect" in text or "AuthorizationHeaderMalformed" in text:
        return UserError(f"{front}: the bucket is in another region", detail=text, hint="Set AWS_REGION.")
    return PenstockError(f"{front}: the store did not answer as expected", detail=text, is_retryable=True)
