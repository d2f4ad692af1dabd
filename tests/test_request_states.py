"""The states of a forwarded request: each event leads where the table of `forwarded` says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gateway_rig import DONE, EVENTS, SSE_HEAD, STREAM, Client, Rig, Seen, chunk
from virtual_loop import advance

from penstock.gateway.accounting.entry import Entry
from penstock.gateway.requests import forwarded

_ROWS = [line.strip("|").split("|") for line in (forwarded.__doc__ or "").splitlines() if line.startswith("| ")]
_ANY_TIME = ("replica", "deadline", "client gone", "shutdown")
CELLS = [
    (state.strip(), event, follower)
    for state, *cells in _ROWS[1:]
    for events, cell in zip(_ROWS[0][1:], cells, strict=True)
    for event in events.strip().split(", ")
    if cell.strip() or event in _ANY_TIME
    for follower in cell.split() or [state.strip()]
]
_FIRST = SSE_HEAD + chunk(EVENTS[0])
_ANSWERS = {
    "failed": b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n",
    "head": _FIRST,
    "whole": chunk(DONE) + b"0\r\n\r\n",
}


class Scene:
    """A request in some state, and what can happen to it."""

    request: Any

    def __init__(self, rig: Rig, client: Client) -> None:
        self.rig, self.client = rig, client
        self.admitted, self.answered = asyncio.Event(), asyncio.Event()
        self.first, self.rest = b"", b""

    @property
    def state(self) -> str:
        return type(self.request.state).__name__

    async def take_held(self) -> None:
        await self.admitted.wait()

    async def reply(self, _: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(self.first)
        await self.answered.wait()
        writer.write(self.rest)
        return bool(self.rest)

    async def reach(self, state: str, follower: str) -> None:
        self.first = _FIRST if state in ("Streaming", "Ended") else b""
        if state not in ("Admitting", "Waiting") or (state, follower) == ("Admitting", "Sending"):
            await self.rig.engine(self.reply)
        self.client.post(STREAM, headers="x-request-timeout: 3\r\n")
        await advance(0.1)
        (self.request,) = self.rig.gateway._context.under_way
        if state == "Ended":
            await self.happen("whole")
        elif follower == "Ended":
            self.request.lost = ("another",)  # so it is not sent once more

    async def happen(self, event: str) -> None:
        if event == "admitted":
            self.admitted.set()
        elif event == "replica":
            await self.rig.engine(self.reply, "new")
        elif event == "deadline":
            await advance(4.0)
        elif event == "client gone":
            self.client.writer.transport.abort()
        elif event == "shutdown":
            self.request.cancel()
        else:
            self.rest = _ANSWERS.get(event, b"")
            self.answered.set()
        await advance(0.05)


@pytest.mark.parametrize(("state", "event", "follower"), CELLS)
async def test_each_event_leads_where_the_table_says(
    state: str, event: str, follower: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Rig(access_log="/dev/null", hold_s=60.0) as rig:
        scene = Scene(rig, await rig.client())
        if state == "Admitting":
            monkeypatch.setattr(Entry, "is_held", True)
            monkeypatch.setattr(Entry, "take_held", lambda _: scene.take_held())
        await scene.reach(state, follower)
        assert scene.state == state
        await scene.happen(event)
        rig.gateway._context.look_after(rig.gateway._context.now())
        assert scene.state == follower
        assert (scene.request in rig.gateway._context.under_way) == (follower != "Ended")
        scene.answered.set()  # its engines end
