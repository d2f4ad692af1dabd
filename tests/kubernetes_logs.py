"""The kubelet's HTTPS endpoint of each node of a test cluster: /containerLogs, by which the API server gives logs."""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from kubernetes_kubelet import KUBELET_PORT, Kubelet, NodeState
from kubernetes_pod import ContainerRun

POLL_S = 0.05
# "2026-11-22T18:00:00.000000000Z ": every line of a log begins with it.
STAMP = 31


class LogServer:
    """Listens on every node's address; a node that is cut off answers nothing."""

    def __init__(self, kubelet: Kubelet, certificate: Path, key: Path) -> None:
        self.kubelet = kubelet
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._tls.load_cert_chain(certificate, key)
        self._servers: list[asyncio.Server] = []

    async def start(self, node: NodeState) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
                await node.connected.wait()
                await self._answer(head.split(b" ", 2)[1].decode(), writer)
            except (OSError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.close()

        self._servers.append(await asyncio.start_server(answer, node.address, KUBELET_PORT, ssl=self._tls))

    def close(self) -> None:
        for server in self._servers:
            server.close()

    async def _answer(self, target: str, writer: asyncio.StreamWriter) -> None:
        url = urlsplit(target)
        query = dict(parse_qsl(url.query))
        try:
            run, path = self._find(url.path)
        except LookupError as error:
            body = str(error).encode()
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n")
            async for chunk in self._lines(run, path, query):
                writer.write(b"%x\r\n" % len(chunk) + chunk + b"\r\n")
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _find(self, path: str) -> tuple[ContainerRun, Path]:
        """The container and its log; LookupError in the kubelet's words where there is none."""
        _, namespace, pod, container = path.strip("/").split("/")
        pod_run = self.kubelet.find(namespace, pod)
        containers = [*pod_run.inits, *pod_run.containers] if pod_run else []
        run = next((one for one in containers if one.name == container), None)
        if pod_run is None or run is None:
            raise LookupError(f"no log of container {container!r} of pod {pod!r}")
        files = (pod_run.logs / run.name).glob("*.log")
        newest = max(files, key=lambda file: int(file.stem), default=None)
        if newest is None:
            reason = run.state.get("waiting", {}).get("reason", "ContainerCreating")
            raise LookupError(f'container "{container}" in pod "{pod}" is waiting to start: {reason}')
        return run, newest

    async def _lines(self, run: ContainerRun, path: Path, query: dict[str, str]) -> AsyncIterator[bytes]:
        """Pieces of the log, whole lines, as the query asks; with `follow` until the container has ended."""
        since = query.get("sinceTime", "").rstrip("Z").encode()  # stamps compare as text
        n_tail = int(query.get("tailLines", sys.maxsize))
        first = 0 if query.get("timestamps") == "true" else STAMP
        with path.open("rb") as file:
            while True:
                process = run.process
                is_running = process is not None and process.log == path and not process.copying.done()
                whole, end, rest = file.read().rpartition(b"\n")
                file.seek(-len(rest), 1)
                lines = [line for line in whole.split(b"\n") if line[: len(since)] >= since] if end else []
                lines, n_tail = lines[max(0, len(lines) - n_tail) :], sys.maxsize
                if lines:
                    yield b"".join(line[first:] + b"\n" for line in lines)
                if query.get("follow") != "true" or not (lines or is_running):
                    return
                await asyncio.sleep(POLL_S)
