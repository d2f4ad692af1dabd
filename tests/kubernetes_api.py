"""The client of the test cluster's parts: calls to its API server, and tables of objects that a watch keeps current."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

Object = dict[str, Any]
MERGE = "application/merge-patch+json"
RETRY_S = 0.2


class ApiError(Exception):
    """An answer of the API server that is no success."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status} {text[:2000]}")
        self.status = status


class Api:
    """Calls as one user. Errors: ApiError; httpx.TransportError when the server is away."""

    def __init__(self, url: str, token: str, certificate: Path) -> None:
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            verify=ssl.create_default_context(cafile=str(certificate)),
            timeout=httpx.Timeout(10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
            trust_env=False,
        )

    async def call(self, method: str, path: str, body: object = None, media: str = "application/json") -> Object:
        content = None if body is None else json.dumps(body)
        answer = await self._client.request(method, path, content=content, headers={"Content-Type": media})
        if answer.is_error:
            raise ApiError(answer.status_code, answer.text)
        found: Object = answer.json() if "json" in answer.headers.get("content-type", "") else {"text": answer.text}
        return found

    async def insist(self, method: str, path: str, body: object = None, media: str = "application/json") -> Object:
        """The same, again and again while the server is away or overloaded."""
        while True:
            try:
                return await self.call(method, path, body, media)
            except httpx.TransportError:
                await asyncio.sleep(RETRY_S)
            except ApiError as error:
                if error.status not in {429, 500, 503, 504}:
                    raise
                await asyncio.sleep(RETRY_S)

    async def events(self, path: str, version: str) -> Any:
        """Watch events from a version on: an iterator that ends when the server closes the stream."""
        query = {"watch": "true", "resourceVersion": version, "timeoutSeconds": "300"}
        timeout = httpx.Timeout(10.0, read=None)
        async with self._client.stream("GET", path, params=query, timeout=timeout) as answer:
            if answer.is_error:
                raise ApiError(answer.status_code, "watch")
            async for line in answer.aiter_lines():
                yield json.loads(line)

    async def close(self) -> None:
        await self._client.aclose()


class Table:
    """All objects of a kind by (namespace, name); `changed(old, new)` is called for each change, None for absence."""

    def __init__(self, api: Api, path: str, changed: Callable[[Object | None, Object | None], None]) -> None:
        self.api, self.path, self.changed = api, path, changed
        self.objects: dict[tuple[str, str], Object] = {}
        self.listed = asyncio.Event()

    async def run(self) -> None:
        """For ever, through absences of the server."""
        while True:
            try:
                version = await self._list()
                self.listed.set()
                async for event in self.api.events(self.path, version):
                    if event["type"] == "ERROR":
                        break
                    item = event["object"]
                    self._put(key_of(item), None if event["type"] == "DELETED" else item)
            except (httpx.TransportError, ApiError):
                await asyncio.sleep(RETRY_S)

    async def _list(self) -> str:
        found = await self.api.call("GET", self.path)
        now = {key_of(item): item for item in found["items"]}
        for key in [key for key in self.objects if key not in now]:
            self._put(key, None)
        for key, item in now.items():
            self._put(key, item)
        return str(found["metadata"]["resourceVersion"])

    def _put(self, key: tuple[str, str], new: Object | None) -> None:
        old = self.objects.get(key)
        if new is None:
            self.objects.pop(key, None)
        else:
            self.objects[key] = new
        if old != new:
            if old and new and old["metadata"]["uid"] != new["metadata"]["uid"]:
                self.changed(old, None)
                old = None
            self.changed(old, new)


def key_of(item: Object) -> tuple[str, str]:
    meta = item["metadata"]
    return meta.get("namespace", ""), meta["name"]
