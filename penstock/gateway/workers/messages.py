"""Messages between a worker and its parent over a socket pair: MessagePack after four bytes of length.

A worker sends a Report every second, its sign of life, and every AdminCall that it got; the parent passes that on to
the other workers. With a `number` the parent waits for their reports and answers with all of them.
"""

from __future__ import annotations

import msgspec

_LENGTH_BYTES = 4


class Report(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`content` is an encoded WorkerReport, which the parent keeps unread. `number`: the call it answers."""

    content: bytes
    number: int = 0


class AdminCall(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A call of the admin address; without a path it only asks for reports. `number` 0: no answer is awaited."""

    path: bytes
    body: bytes
    number: int = 0


class Reports(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The last report of every other worker that runs, and of those that ended without a successor yet."""

    number: int
    running: list[bytes]
    ended: list[bytes]


Message = Report | AdminCall | Reports

_decode = msgspec.msgpack.Decoder(Message).decode


def frame(message: Message) -> bytes:
    content = msgspec.msgpack.encode(message)
    return len(content).to_bytes(_LENGTH_BYTES, "big") + content


class Frames:
    """Cuts a stream of bytes into messages.

    >>> frames = Frames()
    >>> sent = frame(AdminCall(b"/admin/drain", b"{}"))
    >>> frames.feed(sent[:5]), frames.feed(sent[5:])
    ([], [AdminCall(path=b'/admin/drain', body=b'{}', number=0)])
    """

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        self._data += data
        messages = []
        while len(self._data) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._data[:_LENGTH_BYTES], "big")
            if len(self._data) < end:
                break
            messages.append(_decode(self._data[_LENGTH_BYTES:end]))
            del self._data[:end]
        return messages
