"""Small files and headers of a hub repository over HTTP, with nothing but the standard library.

Reads what planning needs of a model of any size: config.json, the index, and the first kilobytes of each safetensors
shard by range request. HF_ENDPOINT, HF_TOKEN and the proxies of the environment are honoured. No code is fetched.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from penstock import __version__
from penstock.errors import UserError
from penstock.models import StoredTensor
from penstock.text import MIB

# https://github.com/huggingface/safetensors#format: eight bytes of length, then JSON, of at most 100 MB.
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
# A shard of 5 GB has 100 to 1,000 tensors, 100 to 150 bytes of header each: one request nearly always.
_FIRST_BYTES = 256 * 1024
_MAX_JSON_BYTES = 64 * MIB
_MAX_SHARDS = 1000
_TIMEOUT_S = 10.0
_N_TRIES = 2
_N_AT_ONCE = 8

# https://github.com/huggingface/huggingface_hub/blob/main/src/huggingface_hub/utils/_http.py: X-Error-Code.
_ERROR_CODES = {
    "GatedRepo": ("it is gated", "Accept the licence on its hub page, then set HF_TOKEN."),
    "RepoNotFound": ("no such repository, or a private one", "Check the name; a private model needs HF_TOKEN."),
}
_STATUSES = {
    401: ("the hub requires a token", "Check the name; a gated or private model needs HF_TOKEN."),
    403: ("the hub refuses this token", "Accept the licence on its hub page with the account of HF_TOKEN."),
    404: ("no such repository or file", "Check the name."),
    429: ("the hub answers: too many requests", "Set HF_TOKEN, or try again in some minutes."),
}


class HubError(UserError):
    """The hub did not give it. `is_missing`: there is no such file (or repository); `is_retryable`: it may later."""

    def __init__(self, message: str, *, detail: str | None = None, hint: str | None = None, status: int | None) -> None:
        super().__init__(message, detail=detail, hint=hint, is_retryable=status is None or status >= 429)
        self.status = status

    @property
    def is_missing(self) -> bool:
        return self.status == 404


class Header:
    """What stands at the beginning of one safetensors file: its tensors, and the bytes they take."""

    def __init__(self, tensors: tuple[StoredTensor, ...], n_bytes: int) -> None:
        self.tensors = tensors
        self.n_bytes = n_bytes


def parse_header(raw: bytes) -> Header:
    """The header in the JSON part of a safetensors file.  Raises ValueError for anything else."""
    rows = json.loads(raw)
    if not isinstance(rows, dict):
        raise ValueError("the header is not an object")
    tensors, n_bytes = [], 0
    for name, row in rows.items():
        if name == "__metadata__":
            continue
        try:
            begin, end = row["data_offsets"]
            tensors.append(StoredTensor(name, str(row["dtype"]), tuple(int(size) for size in row["shape"])))
            n_bytes += int(end) - int(begin)
        except (KeyError, TypeError) as exc:
            raise ValueError(f"tensor {name!r} has no dtype, shape and data_offsets") from exc
    return Header(tuple(tensors), n_bytes)


def header_length(raw: bytes) -> int:
    """Bytes of JSON after the first eight: what these say.  Raises ValueError when it cannot be a safetensors file."""
    length = int.from_bytes(raw[:_LENGTH_BYTES], "little")
    if len(raw) < _LENGTH_BYTES or not 2 <= length <= _MAX_HEADER_BYTES:
        raise ValueError("it is not a safetensors file")
    return length


def read_header(stream: IO[bytes]) -> Header:
    """The header of an open safetensors file.  Raises ValueError."""
    return parse_header(stream.read(header_length(stream.read(_LENGTH_BYTES))))


class Repository:
    """One hub repository at one revision. Methods block on the network and raise HubError."""

    def __init__(self, name: str, revision: str = "main") -> None:
        self.name = name
        self.revision = revision
        self.endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        self._token = os.environ.get("HF_TOKEN", "").strip()
        self._opener = urllib.request.build_opener(_Redirects)

    def config(self) -> tuple[dict[str, Any], str | None]:
        """config.json and the commit that it is of."""
        body, headers = self._get("config.json", _MAX_JSON_BYTES)
        return self._object("config.json", body), headers.get("X-Repo-Commit")

    def json(self, path: str) -> dict[str, Any] | None:
        """A JSON file of the repository; None when there is no such file."""
        try:
            return self._object(path, self._get(path, _MAX_JSON_BYTES)[0])
        except HubError as error:
            if error.is_missing:
                return None
            raise

    def headers(self, paths: Sequence[str]) -> list[Header]:
        """The headers of several safetensors files, eight at once, in the order of `paths`."""
        if len(paths) > _MAX_SHARDS:
            raise self._bad(paths[0], f"the index names {len(paths)} files")
        with ThreadPoolExecutor(_N_AT_ONCE) as pool:
            return list(pool.map(self.header, paths))

    def header(self, path: str) -> Header:
        """The header of one safetensors file: one range request, or two when it is long."""
        raw = self._get(path, _FIRST_BYTES)[0]
        try:
            end = _LENGTH_BYTES + header_length(raw)
            if end > len(raw):
                raw = self._get(path, end)[0]
            return parse_header(raw[_LENGTH_BYTES:end])
        except ValueError as exc:
            raise self._bad(path, str(exc)) from exc

    def _object(self, path: str, body: bytes) -> dict[str, Any]:
        try:
            value = json.loads(body)
        except ValueError as exc:
            raise self._bad(path, f"it is not JSON: {exc}") from exc
        if not isinstance(value, dict):
            raise self._bad(path, "it is not a JSON object")
        return value

    def _bad(self, path: str, why: str) -> HubError:
        return HubError(f'cannot use "{path}" of "{self.name}" on the hub: {why}', status=200)

    def _get(self, path: str, n_bytes: int) -> tuple[bytes, http.client.HTTPMessage]:
        """At most the first `n_bytes` of a file, and the headers. A server without ranges is read that far only."""
        where = urllib.parse.quote(f"{self.name}/resolve/{self.revision}/{path}")
        request = urllib.request.Request(f"{self.endpoint}/{where}", headers={"User-Agent": f"penstock/{__version__}"})
        request.add_header("Range", f"bytes=0-{n_bytes - 1}")
        if self._token:
            # Never sent on to the storage host that the hub redirects to: see _Redirects.
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        for left in reversed(range(_N_TRIES)):
            try:
                with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                    return answer.read(n_bytes), answer.headers
            except urllib.error.HTTPError as exc:
                if exc.code < 500 or not left:
                    raise self._refused(path, exc) from exc
            except (OSError, http.client.HTTPException) as exc:
                if not left:
                    raise self._unreached(exc) from exc
        raise AssertionError("the last try returns or raises")

    def _refused(self, path: str, exc: urllib.error.HTTPError) -> HubError:
        code = exc.headers.get("X-Error-Code", "")
        why, hint = _ERROR_CODES.get(code) or _STATUSES.get(exc.code, (f"HTTP {exc.code}", "Try again later."))
        said = exc.headers.get("X-Error-Message", "")
        exc.close()
        # A repository that is not there is told as 401 to those without a token; a file that is not there as 404.
        return HubError(
            f'could not fetch "{path}" of "{self.name}" from the hub: {why}',
            detail=f"{self.endpoint} answered {exc.code}" + (f": {said}" if said else "") + ".",
            hint=hint,
            status=exc.code,
        )

    def _unreached(self, exc: Exception) -> HubError:
        cause = exc.reason if isinstance(exc, urllib.error.URLError) else exc
        return HubError(
            f'could not reach the hub for "{self.name}": {cause}',
            detail=f"Asked {self.endpoint} (HF_ENDPOINT moves it).",
            hint="Give a folder with its config.json, or check the network and proxies.",
            status=None,
        )


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Carries the token along a redirect within one host (a renamed repository), and to no other host."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        onward = super().redirect_request(req, fp, code, msg, headers, newurl)
        token = req.unredirected_hdrs.get("Authorization")
        old, new = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        if onward is not None and token and (old.scheme, old.netloc) == (new.scheme, new.netloc):
            onward.add_unredirected_header("Authorization", token)
        return onward
