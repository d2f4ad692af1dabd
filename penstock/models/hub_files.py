"""Fetches one file of a hub, through `huggingface_hub`: Xet where the file has it, else HTTP, resumed by range."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from penstock import __version__
from penstock.errors import PenstockError
from penstock.models import hub
from penstock.models.sources import Listing

_XET_POLL_S = 0.5
# Its 10 MB pieces, eight at once, miss the processor's cache and cost a page fault each 4 KiB.
_CHUNK_BYTES = 256 << 10


def fetch_file(listing: Listing, name: str, part: Path, progress: Callable[[int], None]) -> None:
    """Write the file's bytes to `part`, after those that are in it.  Raises HubError, and OSError for a full disk.

    The token goes to the hub's own host only. A file of Xet begins anew: its chunks are in Xet's cache."""
    expected = listing.files[name].size
    hub.asked(listing.source.name, lambda: _fetch(listing, name, part, expected, progress), 1)


def _fetch(listing: Listing, name: str, part: Path, expected: int, progress: Callable[[int], None]) -> None:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get, is_xet_available, xet_get
    from huggingface_hub.utils import build_hf_headers, disable_progress_bars

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its warnings and bars would break our lines
    disable_progress_bars()
    constants.DOWNLOAD_CHUNK_SIZE = _CHUNK_BYTES
    url = hf_hub_url(listing.source.name, name, revision=listing.commit, endpoint=hub.endpoint())
    headers = build_hf_headers(library_name="penstock", library_version=__version__)
    facts = get_hf_file_metadata(url, library_name="penstock", library_version=__version__, endpoint=hub.endpoint())
    if facts.size is not None and facts.size != expected:
        raise PenstockError(
            f'could not fetch "{name}": the hub says {facts.size:,} bytes, and its list of files {expected:,}',
            is_retryable=True,
        )
    xet = getattr(facts, "xet_file_data", None)
    if xet is not None and is_xet_available():
        with _Watched(part, progress):
            xet_get(
                incomplete_path=part,
                xet_file_data=xet,
                headers=headers,
                expected_size=expected,
                displayed_filename=name,
            )
        return
    place = facts.location or url
    if urlsplit(place)[:2] != urlsplit(url)[:2]:
        headers = {key: value for key, value in headers.items() if key.lower() != "authorization"}
    with part.open("ab") as stream:
        if stream.tell() > expected:
            stream.truncate(0)
        counted: Any = _Counted(stream, progress)
        http_get(place, counted, resume_size=stream.tell(), headers=headers, expected_size=expected)


class _Counted:
    """A file that reports what is written to it. Each piece is in the file at once: a kill loses nothing."""

    def __init__(self, stream: IO[bytes], progress: Callable[[int], None]) -> None:
        self._stream, self._progress = stream, progress
        self.name, self.tell, self.flush = stream.name, stream.tell, stream.flush

    def write(self, data: bytes) -> int:
        n_bytes = self._stream.write(data)
        self._stream.flush()
        self._progress(n_bytes)
        return n_bytes

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._stream.seek(offset, whence)

    def truncate(self, size: int | None = None) -> int:
        size = self._stream.tell() if size is None else size
        self._progress(size - self._stream.seek(0, 2))
        return self._stream.truncate(size)


class _Watched:
    """Reports how a file grows, in a thread: Xet writes it without telling."""

    def __init__(self, path: Path, progress: Callable[[int], None]) -> None:
        self._path, self._progress, self._seen = path, progress, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._seen = self._size()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._report()

    def _watch(self) -> None:
        while not self._ended.wait(_XET_POLL_S):
            self._report()

    def _report(self) -> None:
        size = self._size()
        self._progress(size - self._seen)
        self._seen = size

    def _size(self) -> int:
        return self._path.stat().st_size if self._path.is_file() else 0
