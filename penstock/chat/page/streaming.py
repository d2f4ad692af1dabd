"""One answer as it grows: pieces of the gateway in batches, each of which is one update of the page. No Gradio."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator

from msgspec.structs import replace

from penstock.chat import conversation as tree
from penstock.chat import settings as parameters
from penstock.chat.conversation import Conversation, Turn
from penstock.chat.failures import Failure, counted, failure_of, needs_count
from penstock.chat.page.answering import GrowingAnswer, Shown, conversation_boxes
from penstock.chat.page.pacing import batches, pause_s
from penstock.chat.page.sessions import Visitor
from penstock.chat.page.upstream import Upstream
from penstock.errors import PenstockError
from penstock.spec.gateway import Price

_KEPT_EACH_S = 2.0
Update = tuple[list[Shown], Conversation | Turn | None]


class Chat:
    """What answers of all visitors share: the gateway, and how many answers grow now."""

    def __init__(self, upstream: Upstream, prices: dict[str, Price]) -> None:
        self.upstream = upstream
        self._prices = prices
        self.n_streams = 0

    async def answer(
        self, conversation: Conversation, turn: Turn, visitor: Visitor, stop: asyncio.Event
    ) -> AsyncGenerator[Update, None]:
        """What the page shows while the turn is answered, and from time to time what the browser keeps."""
        began_at, earlier = time.monotonic(), conversation_boxes(conversation, turn)
        fields = parameters.fields(conversation.settings)
        if turn.role == "user":
            begun = Turn(new_id(), turn.id, "assistant", model=conversation.settings.model)
        else:
            begun = replace(turn, error=None, finish_reason=None)
            # vLLM's way to let an answer go on: https://docs.vllm.ai/en/stable/serving/openai_compatible_server.html
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        growing = GrowingAnswer(begun, self._prices, began_at)
        last = growing.boxes(began_at)
        yield [*earlier, *last], conversation
        pieces = self.upstream.stream_chat(visitor.key, tree.messages(conversation), fields)
        kept_at, self.n_streams = began_at, self.n_streams + 1
        try:
            arriving = batches(pieces, lambda: pause_s(self.n_streams, growing.n_chars), stop)
            async with contextlib.aclosing(arriving):
                async for batch in arriving:
                    for piece in batch:
                        growing.take(piece)
                    now, boxes = time.monotonic(), growing.boxes(time.monotonic())
                    if boxes == last:
                        continue
                    last, news = boxes, None
                    if now - kept_at >= max(_KEPT_EACH_S, 4 * pause_s(1, growing.n_chars)):
                        news, kept_at = growing.turn(now), now
                    yield [*earlier, *boxes], news
            if stop.is_set():
                growing.stop()
        except PenstockError as exc:
            growing.fail(await self._failure(exc, growing, conversation, visitor))
        finally:
            self.n_streams -= 1
        now = time.monotonic()
        done = replace(tree.answer(conversation, growing.turn(now)), updated_at=time.time())
        yield [*earlier, *growing.last_boxes(done, now)], done

    async def _failure(
        self, error: PenstockError, growing: GrowingAnswer, conversation: Conversation, visitor: Visitor
    ) -> Failure:
        failure = failure_of(error, has_text=bool(growing.n_chars))
        if failure.kind == "key":
            visitor.refuse_soon(failure.text)
        if not needs_count(failure):
            return failure
        model, max_tokens = conversation.settings.model, conversation.settings.max_tokens
        return counted(failure, await self.upstream.count(visitor.key, tree.messages(conversation), model), max_tokens)


def new_id() -> str:
    return "t" + secrets.token_hex(8)
