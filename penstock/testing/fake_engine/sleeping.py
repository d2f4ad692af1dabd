"""The fake engine's sleep: the routes of vLLM's development mode that put it to sleep and wake it.

As in vLLM requests that come meanwhile wait, `mode=wait` lets those that run finish first, and level 2 drops the
weights: a request before they are loaded again gets an error here (vLLM would answer nonsense).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import parse_qs

from penstock.testing.fake_engine.options import Options
from penstock.testing.fake_engine.requests import Refusal, Request, error
from penstock.testing.fake_engine.startup_log import Line

METHODS = {
    "/sleep": ("POST",),
    "/wake_up": ("POST",),
    "/is_sleeping": ("GET",),
    "/collective_rpc": ("POST",),
    "/reset_prefix_cache": ("POST",),
}
_TAGS = frozenset(("weights", "kv_cache"))
_POLL_S = 0.005


class Sleep:
    """`awake` is set while requests run; `level` is 0 while all memory is there; `tags`: the parts that are not."""

    def __init__(self, options: Options, log: Callable[[Line], None], n_running: Callable[[], int]) -> None:
        self.awake = asyncio.Event()
        self.awake.set()
        self.level = 0
        self.tags: frozenset[str] = frozenset()
        self.has_weights = True
        # Without the variable vLLM has none of these routes.
        self.is_open = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
        self._options, self._log, self._n_running = options, log, n_running

    async def answer(self, request: Request) -> tuple[int, dict[str, object]]:
        """(status, payload). Takes as long as the options say."""
        query = parse_qs(request.query)
        match request.path:
            case "/sleep":
                return await self._fall_asleep(int(query.get("level", ["1"])[0]), query.get("mode", ["abort"])[0])
            case "/wake_up":
                return await self._wake(frozenset(query.get("tags", _TAGS)))
            case "/is_sleeping":
                return 200, {"is_sleeping": not self.awake.is_set()}
            case "/collective_rpc":
                return self._call(request.body)
            case _:
                return 200, {"success": True}

    def refuse(self) -> None:
        """Raises Refusal for a request that the engine cannot answer now."""
        if not self.has_weights:
            raise Refusal(500, error("the weights were dropped and not loaded again", "InternalServerError", None, 500))

    async def _fall_asleep(self, level: int, mode: str) -> tuple[int, dict[str, object]]:
        if not self._options.enable_sleep_mode or mode != "wait":
            return _failed("sleep mode is not enabled" if mode == "wait" else f"mode {mode} is not faked")
        self.awake.clear()
        while self._n_running():
            await asyncio.sleep(_POLL_S)
        await asyncio.sleep(self._options.sleep_s)
        self.level, self.tags, self.has_weights = level, _TAGS, self.has_weights and level < 2
        self._log(Line(f"It took {self._options.sleep_s:.6f} seconds to fall asleep.", "EngineCore"))
        return 200, {"status": "sleeping", "level": level}

    async def _wake(self, tags: frozenset[str]) -> tuple[int, dict[str, object]]:
        if self._options.refuse_wake:
            return _failed("CUDA Error: out of memory")
        if "weights" in tags & self.tags:
            await asyncio.sleep(self._options.wake_s)
        self.tags -= tags
        if not self.tags:
            self.level = 0
            self.awake.set()
            self._log(Line(f"It took {self._options.wake_s:.6f} seconds to wake up tags None.", "EngineCore"))
        return 200, {"status": "sleeping" if self.tags else "awake", "tags": sorted(tags)}

    def _call(self, body: bytes) -> tuple[int, dict[str, object]]:
        if json.loads(body).get("method") != "reload_weights" or "weights" in self.tags:
            return _failed("only reload_weights is faked, with room for the weights")
        self.has_weights = True
        return 200, {"results": [None]}


def _failed(message: str) -> tuple[int, dict[str, object]]:
    return HTTPStatus.INTERNAL_SERVER_ERROR, error(message, "InternalServerError", None, 500)
