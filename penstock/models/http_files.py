"""Files by plain HTTP: one request, its redirects, and the bytes into a partial file. Checks what an answer says.

`http.client` and one buffer for all of a file: general HTTP packages need more of a core than SHA-256 does.
HTTP(S)_PROXY, NO_PROXY, SSL_CERT_FILE and SSL_CERT_DIR of the environment count.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import os
import re
import ssl
import urllib.request
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from penstock import __version__
from penstock.errors import PenstockError, UserError
from penstock.models.part_file import CannotContinueError, PartFile

_Value = TypeVar("_Value")
# Fills a buffer of this size again and again: it stays in the processor's cache, and no page of it is new.
_BLOCK_BYTES = 1 << 20
_TIMEOUT_S = 30.0
_MOST_REDIRECTS = 10
_MOST_WORDS_BYTES = 500
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)\Z")
_SAFE = "%/:=&?~#+!$,;'@()*[]"  # of a Location: what urllib leaves as it is


class StatusError(Exception):
    """An answer that is neither a file nor a redirect. `words`: the beginning of its body."""

    def __init__(self, url: str, status: int, headers: Mapping[str, str], words: str) -> None:
        super().__init__(f"HTTP {status}")
        self.url, self.status, self.headers, self.words = url, status, headers, words


class Answer(NamedTuple):
    """The answer to a request for the bytes of `url` from `begin` on; names of `headers` are lower case. `what`: the
    file, for messages."""

    what: str
    url: str
    begin: int
    headers: Mapping[str, str]
    status: int
    body: http.client.HTTPResponse
    asked_with: Mapping[str, str]

    def close(self) -> None:
        self.body.close()

    @property
    def is_redirect(self) -> bool:
        return self.status in _REDIRECTS


def get(what: str, url: str, headers: Mapping[str, str], begin: int = 0) -> Answer:
    """Ask for a file from byte `begin` on; the answer may be a redirect.

    Raises StatusError, and PenstockError (which may be tried again) when the server was not reached.
    """
    fields = {"User-Agent": f"penstock/{__version__}"} | dict(headers) | {"Accept-Encoding": "identity"}
    fields |= {"Range": f"bytes={begin}-"} if begin else {}
    connection, target, extra = _connection(what, url)
    body = _of_network(what, url, lambda: _asked(connection, target, {**extra, **fields}))
    received: dict[str, str] = {}
    for name, value in body.getheaders():
        received[name.lower()] = f"{received[name.lower()]}, {value}" if name.lower() in received else value
    answer = Answer(what, url, begin, received, body.status, body, headers)
    if answer.is_redirect or body.status in (http.client.OK, http.client.PARTIAL_CONTENT):
        return answer
    if begin and body.status == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
        answer.close()
        raise CannotContinueError(f"could not fetch {what}: the server has no byte {begin:,}")
    with contextlib.closing(body):
        words = _of_network(what, url, lambda: body.read(_MOST_WORDS_BYTES)).decode("utf-8", "replace")
    raise StatusError(url, body.status, received, " ".join(words.split()))


def follow(answer: Answer) -> Answer:
    """The answer behind all redirects. Authorization goes to no other scheme, host or port, and no redirect leads from
    https to http.  Raises as `get`."""
    for _ in range(_MOST_REDIRECTS):
        if not answer.is_redirect:
            return answer
        answer.close()
        url = urljoin(answer.url, quote(answer.headers.get("location") or "", safe=_SAFE))
        before = origin(answer.what, answer.url)
        after = origin(answer.what, url)
        if before.startswith("https:") and after.startswith("http:"):
            raise UserError(
                f"could not fetch {answer.what}: {before} redirects to {after}, without encryption",
                hint="Check the address of the mirror, and the proxy.",
            )
        headers = answer.asked_with
        if before != after:
            headers = {
                name: value for name, value in headers.items() if name.lower() not in ("authorization", "cookie")
            }
        answer = get(answer.what, url, headers, answer.begin)
    raise PenstockError(f"could not fetch {answer.what}: more than {_MOST_REDIRECTS} redirects")


def receive(answer: Answer, part: PartFile, n_bytes: int) -> None:
    """Write the body behind what is in `part`, until that has `n_bytes`; a server without ranges sends all again.

    Raises PenstockError, which may be tried again: another size, a body that ends early. OSError of the disk.
    """
    with contextlib.closing(answer.body):
        _check(answer, part, n_bytes)
        buffer = memoryview(bytearray(min(_BLOCK_BYTES, max(1, n_bytes - part.n_bytes))))
        while part.n_bytes < n_bytes:
            place = buffer[: n_bytes - part.n_bytes]
            n_read = _of_network(answer.what, answer.url, functools.partial(answer.body.readinto, place))
            if not n_read:
                raise PenstockError(f"could not fetch {answer.what}: the connection ended early", is_retryable=True)
            part.write(place[:n_read])


def read(answer: Answer, most_bytes: int) -> bytes:
    """The first bytes of a body.  Raises PenstockError."""
    with contextlib.closing(answer.body):
        return _of_network(answer.what, answer.url, functools.partial(answer.body.read, most_bytes))


def _check(answer: Answer, part: PartFile, n_bytes: int) -> None:
    """Whether the answer is the rest of the file, or all of it."""
    match = _RANGE.match(answer.headers.get("content-range") or "")
    if answer.status == http.client.PARTIAL_CONTENT:
        if match is None or int(match[1]) != part.n_bytes:
            raise CannotContinueError(f"could not fetch {answer.what}: the server sent another range")
        whole = int(match[2]) if match[2] != "*" else n_bytes
    else:
        if part.n_bytes:
            part.clear()
        length = answer.headers.get("content-length") or ""
        whole = int(length) if length.isdecimal() else n_bytes
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise UserError(
            f"could not fetch {answer.what}: {origin(answer.what, answer.url)} sends it compressed",
            hint="Let the mirror or the proxy send files as they are.",
        )
    if whole != n_bytes:
        raise PenstockError(
            f"could not fetch {answer.what}: the server has {whole:,} bytes, and the list of files says {n_bytes:,}",
            is_retryable=True,
        )


def _connection(what: str, url: str) -> tuple[http.client.HTTPConnection, str, dict[str, str]]:
    """A connection that is not open yet, the target of the request, and headers for a proxy or the server."""
    origin(what, url)
    parts = urlsplit(url)
    host, is_secure = parts.hostname or "", parts.scheme == "https"
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    fields = _basic("Authorization", parts)
    proxies = urllib.request.getproxies()
    address = proxies.get(parts.scheme) or proxies.get("all")
    if not address or urllib.request.proxy_bypass(host):
        return _unopened(is_secure, host, parts.port), target, fields
    proxy = urlsplit(address if "://" in address else f"http://{address}")
    if proxy.scheme != "http" or not proxy.hostname:
        raise UserError(f"could not fetch {what}: a {proxy.scheme} proxy cannot be used", hint="Use an HTTP proxy.")
    ours = _basic("Proxy-Authorization", proxy)
    connection = _unopened(is_secure, proxy.hostname, proxy.port or 80)
    if not is_secure:
        return connection, f"http://{parts.netloc.rpartition('@')[2]}{target}", fields | ours
    connection.set_tunnel(host, parts.port or 443, ours)
    return connection, target, fields


def _unopened(is_secure: bool, host: str, port: int | None) -> http.client.HTTPConnection:
    if is_secure:
        return http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=_tls())
    return http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)


def _asked(connection: http.client.HTTPConnection, target: str, fields: Mapping[str, str]) -> http.client.HTTPResponse:
    try:
        connection.request("GET", target, headers=dict(fields))
        response = connection.getresponse()
    except BaseException:
        connection.close()
        raise
    if connection.sock is not None:  # the response keeps the socket until it is closed, as urllib has it
        connection.sock.close()
        connection.sock = None
    return response


@functools.cache
def _tls() -> ssl.SSLContext:
    """Trusts the system's authorities, those of SSL_CERT_FILE and SSL_CERT_DIR (or what other tools read), and
    certifi's where the system may have none."""
    environment = os.environ
    named = (
        environment.get("SSL_CERT_FILE") or environment.get("REQUESTS_CA_BUNDLE") or environment.get("CURL_CA_BUNDLE")
    )
    context = ssl.create_default_context()
    try:
        if named:
            context.load_verify_locations(named)
        elif not environment.get("SSL_CERT_DIR"):
            import certifi

            context.load_verify_locations(certifi.where())
    except ImportError:
        pass
    except OSError as exc:
        raise UserError(f'cannot use certificates "{named}": {exc}', hint="Check SSL_CERT_FILE.") from exc
    return context


def _basic(name: str, parts: SplitResult) -> dict[str, str]:
    """The header for user and password of an address."""
    if parts.username is None:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {name: f"Basic {base64.b64encode(pair.encode()).decode()}"}


def origin(what: str, url: str) -> str:
    """ "https://host:443".  Raises UserError for what is no address of HTTP."""
    parts = urlsplit(url)
    with contextlib.suppress(KeyError, ValueError):  # another protocol, or the port is no number
        port = parts.port or _PORTS[parts.scheme]
        if parts.hostname:
            return f"{parts.scheme}://{parts.hostname}:{port}"
    shown = url.partition("?")[0].rpartition("@")[2][:200]  # the rest may hold a secret
    raise UserError(f'could not fetch {what}: "{shown}" is no address of a file', hint="Check the address of the hub.")


def _of_network(what: str, url: str, call: Callable[[], _Value]) -> _Value:
    """A call that talks to the server.  Raises PenstockError when the connection is lost."""
    try:
        return call()
    except (OSError, http.client.HTTPException, ValueError) as exc:
        where, words, hint = origin(what, url), f"{type(exc).__name__}: {str(exc)[:200]}", None
        if isinstance(exc, ssl.SSLCertVerificationError):
            hint = "If a proxy or a mirror has a private certificate authority: set SSL_CERT_FILE to its certificate."
        raise PenstockError(
            f"could not fetch {what}: the connection to {where} failed",
            detail=words,
            hint=hint,
            is_retryable=hint is None,
        ) from exc
