"""A reverse proxy that serves an address below a path, as nginx and cloud consoles do: one connection a request."""

from __future__ import annotations

import asyncio
import contextlib
import threading


class PathProxy:
    """`url`: PREFIX on a free port of loopback. The prefix is taken off; X-Forwarded-* say what it was."""

    def __init__(self, port: int, prefix: str, *, strips: bool = True) -> None:
        self._port, self._prefix, self._strips = port, prefix, strips
        self.outside: list[str] = []  # paths that were asked for and do not begin with the prefix
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> PathProxy:
        self._thread.start()
        started = asyncio.start_server(self._serve, "127.0.0.1", 0)
        server = asyncio.run_coroutine_threadsafe(started, self._loop).result(60)
        self._host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self.url = f"http://{self._host}{self._prefix}/"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            first, _, lines = head.decode("latin-1").partition("\r\n")
            method, path, version = first.split(" ")
            if not path.startswith(self._prefix):
                self.outside.append(path)
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            path = (path.removeprefix(self._prefix) or "/") if self._strips else path
            kept = [line for line in lines.split("\r\n") if line and not line.lower().startswith("connection:")]
            forwarded = {"Prefix": self._prefix, "Proto": "http", "Host": self._host}
            kept += [f"X-Forwarded-{name}: {value}" for name, value in forwarded.items()]
            upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self._port)
            upstream.write("\r\n".join([f"{method} {path} {version}", *kept, "Connection: close", "", ""]).encode())
            with contextlib.closing(upstream):
                upward = asyncio.ensure_future(_pump(reader, upstream))
                downward = asyncio.ensure_future(_pump(upstream_reader, writer))
                await asyncio.wait((upward, downward), return_when=asyncio.FIRST_COMPLETED)
                upward.cancel()
                downward.cancel()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
