"""Fetches one file of a hub: by Xet where the file has it and `hf_xet` is installed, else by HTTP, resumed by range."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.errors import PenstockError, UserError
from penstock.models import http_files, hub
from penstock.models.part_file import PartFile
from penstock.models.sources import Listing

_XET_POLL_S = 0.5
_XET_LINK = re.compile(r'<([^<>]+)>\s*;\s*rel="?xet-auth"?')
_MAIN_HUB = "https://huggingface.co"


def fetch_file(listing: Listing, name: str, part: PartFile) -> None:
    """Write the file's bytes to `part`, after those that are in it.  Raises HubError, PenstockError that may be tried
    again, and OSError of the disk.

    The token goes to the hub's own address only. A file of Xet begins anew: its chunks are in Xet's cache."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    model, what = listing.source.name, f'"{name}" of "{listing.source}"'
    url = hf_hub_url(model, name, revision=listing.commit, endpoint=hub.endpoint())
    headers = build_hf_headers(library_name="penstock", library_version=__version__)
    try:
        answer = http_files.get(what, url, headers, part.n_bytes)
        _check_version(what, answer.headers, listing, name)
        if answer.is_redirect and (xet := _xet_data(answer)) is not None:
            answer.close()
            _fetch_xet(model, name, xet, headers, part, listing.files[name].size)
            return
        http_files.receive(http_files.follow(answer), part, listing.files[name].size)
    except http_files.StatusError as exc:
        raise _refused(model, what, exc) from exc


def _check_version(what: str, headers: Mapping[str, str], listing: Listing, name: str) -> None:
    """A mirror may answer with another revision, and an author may push while we fetch.  Raises UserError."""
    commit, size = headers.get("x-repo-commit"), headers.get("x-linked-size", "")
    if commit is not None and commit != listing.commit:
        raise UserError(
            f"could not fetch {what}: the hub answers with commit {commit[:12]}, and not {listing.commit[:12]}",
            hint="Its revision has moved: start again.",
        )
    expected = listing.files[name].size
    if size.isdecimal() and int(size) != expected:
        raise PenstockError(
            f"could not fetch {what}: the hub has {int(size):,} bytes, and its list of files says {expected:,}",
            is_retryable=True,
        )


def _refused(model: str, what: str, exc: http_files.StatusError) -> PenstockError:
    if http_files.origin(what, exc.url) == http_files.origin(what, hub.endpoint()):
        return hub.refusal(model, exc.status, exc.headers, exc.words)
    # The place that holds the bytes: addresses there are valid for minutes, and the hub gives a new one.
    where, wait_s = http_files.origin(what, exc.url), hub.wait_s(exc.headers)
    message = f"could not fetch {what}: {where} answers with HTTP {exc.status}"
    return hub.HubError(message, detail=exc.words, hint="Try again later.", status=None, wait_s=wait_s)


def _xet_data(answer: http_files.Answer) -> Any:
    """Where Xet has the file; None where it has not, or cannot be used here."""
    from huggingface_hub.file_download import is_xet_available

    digest, link = answer.headers.get("x-xet-hash"), _XET_LINK.search(answer.headers.get("link", ""))
    if digest is None or link is None or not is_xet_available():
        return None
    from huggingface_hub.utils._xet import XetFileData

    route = hub.endpoint() + link[1].removeprefix(_MAIN_HUB) if link[1].startswith(_MAIN_HUB) else link[1]
    # The token is sent there too.
    is_own = http_files.origin(answer.what, route) == http_files.origin(answer.what, answer.url)
    return XetFileData(digest, route) if is_own else None


def _fetch_xet(model: str, name: str, data: Any, headers: dict[str, str], part: PartFile, expected: int) -> None:
    from huggingface_hub.file_download import xet_get
    from huggingface_hub.utils import disable_progress_bars

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its warnings and bars would break our lines
    disable_progress_bars()
    part.clear()

    def fetch() -> None:
        xet_get(
            incomplete_path=part.path,
            xet_file_data=data,
            headers=headers,
            expected_size=expected,
            displayed_filename=name,
        )

    with _Watched(part.path, part.report):
        hub.asked(model, fetch, 1)
    part.read_written()


class _Watched:
    """Reports how a file grows, in a thread: Xet writes it without telling."""

    def __init__(self, path: Path, report: Callable[[int], None]) -> None:
        self._path, self._report_bytes, self._seen = path, report, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._report()

    def _watch(self) -> None:
        while not self._ended.wait(_XET_POLL_S):
            self._report()

    def _report(self) -> None:
        size = self._path.stat().st_size if self._path.is_file() else 0
        self._report_bytes(size - self._seen)
        self._seen = size
