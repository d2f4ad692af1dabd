"""A port of this machine that leads to an application: `python -m penstock.targets.cloudera.relay RUN PORT [ui]`.

An application asks for a login of the workbench by the header in which clients of OpenAI's API send their key. The
relay moves the client's key into x-api-key, which the gateway reads too, and adds the workbench's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import sys
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from penstock.errors import PenstockError
from penstock.run_folder import Run
from penstock.targets.cloudera import names, session
from penstock.targets.cloudera.api import application_url
from penstock.wire.client import tls_context

_HEAD_BYTES, _PIECE_BYTES, _CONNECT_S = 65536, 65536, 20.0
_OURS = (b"host", b"authorization", b"connection", b"x-api-key", b"keep-alive")


class Upstream(msgspec.Struct, frozen=True):
    """An application's URL, and the key of the workbench that opens it."""

    url: str
    key: str
    ca_file: str | None = None


def forwarded_head(head: bytes, upstream: Upstream) -> bytes:
    """The head of a request as the application gets it: one request for each connection. Pure."""
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    fields = {line.partition(b":")[0].strip().lower(): line.partition(b":")[2].strip() for line in lines}
    kept = [line for line in lines if line.partition(b":")[0].strip().lower() not in _OURS]
    scheme, _, key = fields.get(b"authorization", b"").partition(b" ")
    own = key.strip() if scheme.lower() == b"bearer" else fields.get(b"x-api-key", b"")
    kept += [b"host: " + urlsplit(upstream.url).netloc.encode(), b"authorization: Bearer " + upstream.key.encode()]
    kept += [b"connection: close", *([b"x-api-key: " + own] if own else [])]
    return b"\r\n".join([first, *kept, b"", b""])


def is_login(head: bytes, upstream: Upstream) -> bool:
    """Whether the head of an answer sends its client to a login: to another host. Pure."""
    first, *lines = head.split(b"\r\n")
    fields = {line.partition(b":")[0].strip().lower(): line.partition(b":")[2].strip() for line in lines}
    host = urlsplit(fields.get(b"location", b"").decode("latin-1")).netloc
    return first.split(b" ")[1:2] in ([b"302"], [b"303"]) and host not in ("", urlsplit(upstream.url).netloc)


class Relay:
    """Serves one application on a port of 127.0.0.1."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream, parts = upstream, urlsplit(upstream.url)
        self._tls: ssl.SSLContext | None = tls_context(ca_file=upstream.ca_file) if parts.scheme == "https" else None
        self._host, self._port = parts.hostname or "", parts.port or (443 if self._tls else 80)

    async def serve(self, port: int) -> None:
        server = await asyncio.start_server(self._on_client, "127.0.0.1", port, limit=_HEAD_BYTES)
        await server.serve_forever()

    async def _on_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _CONNECT_S)
            try:
                opened = asyncio.open_connection(self._host, self._port, ssl=self._tls)
                above_reader, above = await asyncio.wait_for(opened, _CONNECT_S)
            except (OSError, TimeoutError) as exc:
                why = f"could not connect to {self._upstream.url}: {exc or 'no answer'}"
                writer.write(_refusal("502 Bad Gateway", why, "unreachable"))
                await writer.drain()
            else:
                above.write(forwarded_head(head, self._upstream))
                tasks = [asyncio.create_task(_pipe(reader, above))]
                tasks.append(asyncio.create_task(self._answer(above_reader, writer)))
                await _first(tasks)
                above.close()
        writer.close()

    async def _answer(self, above: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await above.readuntil(b"\r\n\r\n")
            if is_login(head, self._upstream):
                why = f"the workbench asks for a login at {self._upstream.url}: its API key does not open applications"
                writer.write(_refusal("401 Unauthorized", why, "workbench_login"))
                await writer.drain()
                return
            writer.write(head)
        await _pipe(above, writer)


async def _first(tasks: list[asyncio.Task[None]]) -> None:
    """Until the application has answered or the client has left; then neither direction goes on."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()


def _refusal(status: str, why: str, code: str) -> bytes:
    body = msgspec.json.encode({"error": {"message": why, "type": "server_error", "code": code}})
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return f"{head}connection: close\r\n\r\n".encode() + body


def main(words: list[str]) -> None:
    run, port, part = Run(Path(words[0])), int(words[1]), words[2] if len(words) > 2 else ""
    block = names.block_of(run.deployment())
    workbench = session.connect(block)
    url = application_url(workbench.url, names.subdomain(run.name, part))
    asyncio.run(Relay(Upstream(url, workbench.key, workbench.ca_file)).serve(port))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except PenstockError as exc:
        sys.exit(f"penstock: {exc.message}. {exc.hint or ''}")
