"""A call of the gateway's own: one request whose answer's status is all that counts."""

from __future__ import annotations

import asyncio

from penstock.gateway.http1 import ResponseHead
from penstock.gateway.upstream import UpstreamConnection, UpstreamError


class _StatusOnly:
    takes_chunks = False

    def __init__(self, whole: asyncio.Future[int]) -> None:
        self._whole = whole
        self._status = 0

    def receive(self, head: ResponseHead | None, data: bytes, is_end: bool) -> None:
        if head is not None:
            self._status = head.status
        if is_end and not self._whole.done():
            self._whole.set_result(self._status)

    def receive_chunks(self, data: bytes, is_end: bool) -> None:
        raise AssertionError("not asked for")

    def lost(self, error: UpstreamError) -> None:
        if not self._whole.done():
            self._whole.set_exception(error)


async def call(connection: UpstreamConnection, request: bytes) -> int:
    """The status of the answer to `request`, once it is whole. Raises UpstreamError.

    The caller bounds it in time, and closes the connection when it did not return.
    """
    whole: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    connection.send(request, _StatusOnly(whole))
    return await whole
