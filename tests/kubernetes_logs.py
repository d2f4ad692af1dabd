"""The kubelet's HTTPS endpoint of each node of a test cluster: /containerLogs, by which the API server gives logs."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

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
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        found = self._find(url.path, query)
        if isinstance(found, str):
            body = found.encode()
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
            return
        path, run = found
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n")
        async for chunk in self._lines(run, path, query):
            writer.write(b"%x\r\n" % len(chunk) + chunk + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _find(self, path: str, query: dict[str, str]) -> tuple[Path, ContainerRun] | str:
        """The log that is asked for and its container; or why there is none, in the kubelet's words."""
        verb, namespace, pod, container, *_ = [*map(unquote, path.split("/")[1:]), "", "", ""]
        pod_run = self.kubelet.find(namespace, pod)
        containers = [*pod_run.inits, *pod_run.containers] if pod_run else []
        run = next((one for one in containers if one.name == container), None)
        if verb != "containerLogs" or pod_run is None or run is None:
            return f"no log of container {container!r} of pod {pod!r}"
        files = sorted((pod_run.logs / run.name).glob("*.log"), key=lambda file: int(file.stem))
        if not files:
            reason = run.state.get("waiting", {}).get("reason", "ContainerCreating")
            return f'container "{container}" in pod "{pod}" is waiting to start: {reason}'
        if query.get("previous") == "true" and "waiting" not in run.state:
            files.pop()  # while it waits for its next start, the last one is the previous one
        return (files[-1], run) if files else f'previous terminated container "{container}" in pod "{pod}" not found'

    async def _lines(self, run: ContainerRun, path: Path, query: dict[str, str]) -> AsyncIterator[bytes]:
        """Pieces of the log, whole lines, as the query asks; with `follow` until the container has ended."""
        since = _since(query)
        n_tail = int(query["tailLines"]) if "tailLines" in query else None
        with path.open("rb") as file:
            lines = [line for line in file.read().splitlines(keepends=True) if line[: len(since)] >= since]
            if lines and not lines[-1].endswith(b"\n"):
                file.seek(-len(lines.pop()), 1)
            shown = lines if n_tail is None else lines[len(lines) - min(n_tail, len(lines)) :]
            if chunk := _shown(shown, query):
                yield chunk
            while query.get("follow") == "true":
                process = run.process
                is_running = process is not None and process.log == path and not process.copying.done()
                if more := file.read():
                    whole, _, rest = more.rpartition(b"\n")
                    file.seek(-len(rest), 1)
                    if whole:
                        yield _shown((whole + b"\n").splitlines(keepends=True), query)
                elif not is_running:
                    return
                await asyncio.sleep(POLL_S)


def _since(query: dict[str, str]) -> bytes:
    """The prefix of stamps before which lines are left out; they compare as text."""
    if "sinceSeconds" in query:
        moment = datetime.utcfromtimestamp(time.time()) - timedelta(seconds=int(query["sinceSeconds"]))
        return moment.strftime("%Y-%m-%dT%H:%M:%S").encode()
    return query.get("sinceTime", "").rstrip("Z").encode()


def _shown(lines: list[bytes], query: dict[str, str]) -> bytes:
    return b"".join(lines if query.get("timestamps") == "true" else [line[STAMP:] for line in lines])
