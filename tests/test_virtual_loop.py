"""The virtual loop itself: time jumps, what cannot end fails at once, and connections do what TCP does."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest
import virtual_loop
from virtual_loop import BEGINS_AT, VirtualLoop, advance, loop
from virtual_network import RECEIVE_BYTES


async def test_time_jumps_to_the_next_timer_and_threads_share_it() -> None:
    seen: list[tuple[str, float]] = []
    event = loop().world.event()

    def work() -> None:
        seen.append(("waited", event.wait(5.0)))
        running.world.sleep(2.0)
        seen.append(("slept", running.time() - BEGINS_AT))
        seen.append(("set", event.wait(60.0)))

    running = loop()
    thread = running.world.thread(work, "t")
    await advance(60.0)
    assert seen == [("waited", False), ("slept", 7.0)]
    event.set()
    await advance(0)
    await advance(0)
    assert (seen[-1], thread.is_alive(), running.time()) == (("set", True), False, BEGINS_AT + 60.0)
    assert await running.run_in_executor(None, max, 1, 2) == 2


async def never() -> None:
    await asyncio.get_running_loop().create_future()


async def ticks() -> None:
    while True:
        await advance(1.0)


async def spins() -> None:
    while True:
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("test", "words"), [(never, "nothing can happen"), (ticks, "not done after 300"), (spins, "no time passes")]
)
def test_what_cannot_end_fails_and_says_who_waits(test: object, words: str) -> None:
    made = VirtualLoop()
    task = made.create_task(test())  # type: ignore[operator]
    with pytest.raises(AssertionError, match=words) as caught:
        made.run_until_complete(task)
    assert "waits in" in str(caught.value)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        made.run_until_complete(task)
    made.close()


Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def pair() -> tuple[Pair, Pair]:
    served: asyncio.Future[Pair] = loop().create_future()
    server = await asyncio.start_server(lambda *streams: served.set_result(streams), "127.0.0.1", 0)
    client = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
    peer = await served
    server.close()
    return client, peer


async def test_a_writer_waits_for_a_reader_and_bytes_come_as_cut() -> None:
    (_, writer), (reader, _) = await pair()
    size = 8 * RECEIVE_BYTES
    writer.write(bytes(size))
    assert writer.transport.get_write_buffer_size() == size - RECEIVE_BYTES
    draining = asyncio.ensure_future(writer.drain())
    await advance(1.0)
    assert not draining.done()
    assert len(await reader.readexactly(size)) == size
    await draining
    loop().bytes_at_once = 1
    writer.write(b"abc")
    assert await reader.read(100) == b"a"
    writer.write_eof()
    assert await reader.read() == b"bc"


async def test_ends_and_resets_are_those_of_tcp() -> None:
    (reader, writer), (_, peer) = await pair()
    peer.write(b"last")
    peer.close()
    assert await reader.read() == b"last"
    writer.write(b"x")  # to a closed socket
    with pytest.raises(ConnectionError):
        await advance(0.1)
        writer.write(b"y")
        await writer.drain()
    for has_linger, has_unread in ((True, False), (False, True)):
        (reader, writer), (_, peer) = await pair()
        if has_linger:
            sock = peer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if has_unread:
            peer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(b"unread")
            await advance(0.1)
        peer.transport.abort()
        with pytest.raises(ConnectionResetError):
            await reader.read()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", 1)


def test_a_task_that_would_block_the_loop_is_refused() -> None:
    async def blocks() -> None:
        loop().world.sleep(1.0)

    with pytest.raises(AssertionError, match="would block the loop"):
        virtual_loop.run(blocks())
