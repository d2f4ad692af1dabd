"""What the fake engine was asked to do: the flags, as a frozen value."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

Refusal = Literal["kv-cache", "no-blocks", "memory"]


@dataclass(frozen=True)
class Options:
    """All flags. `tokens_per_s` is per request and may be `inf`; a count of None means "never"."""

    model: str = "fake"
    served_model_name: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 0
    load_s: float = 0.0
    shards: int = 4
    ttft_s: float = 0.01
    tokens_per_s: float = 200.0
    tokens_per_chunk: int = 1
    reply_tokens: int = 32
    max_model_len: int = 1024
    max_num_seqs: int = 256
    kv_cache_tokens: int = 87296
    crash_at_start: str | None = None
    oom: Refusal | None = None
    crash_after_requests: int | None = None
    crash_mid_stream: int | None = None
    hang_after_requests: int | None = None
    fault_once: str | None = None
    ignore_sigterm_while_loading: bool = False
    ignore_sigterm: bool = False
    shutdown_timeout: float = 0.0
    child: bool = False
    echo_body: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names it answers to; the first is the one it gives itself in replies, as vLLM does."""
        return self.served_model_name or (self.model,)


def parse(argv: Sequence[str]) -> Options:
    given = vars(_parser().parse_args(argv))
    given["served_model_name"] = tuple(given["served_model_name"])
    return Options(**{field.name: given[field.name] for field in fields(Options)})


def _parser() -> argparse.ArgumentParser:
    defaults = Options()
    parser = argparse.ArgumentParser(
        prog="python -m penstock.testing.fake_engine",
        description="An engine that speaks like vLLM and has no model. docs/how-to/testing.md explains every flag.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_place(parser, defaults)
    _add_pace(parser, defaults)
    _add_faults(parser)
    _add_life(parser, defaults)
    return parser


def _add_place(parser: argparse.ArgumentParser, defaults: Options) -> None:
    parser.add_argument("--host", default=defaults.host)
    parser.add_argument("--port", type=int, default=defaults.port, help="0 takes a free one and logs it")
    parser.add_argument("--model", required=True)
    parser.add_argument("--served-model-name", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--max-model-len", type=int, default=defaults.max_model_len, metavar="TOKENS")
    parser.add_argument("--max-num-seqs", type=int, default=defaults.max_num_seqs, help="more requests wait")
    parser.add_argument("--kv-cache-tokens", type=int, default=defaults.kv_cache_tokens, metavar="TOKENS")


def _add_pace(parser: argparse.ArgumentParser, defaults: Options) -> None:
    parser.add_argument("--load-s", type=float, default=defaults.load_s, help="seconds from start to ready")
    parser.add_argument("--shards", type=int, default=defaults.shards, help="lines of loading progress")
    parser.add_argument("--ttft-s", type=float, default=defaults.ttft_s, help="seconds to the first token")
    parser.add_argument("--tokens-per-s", type=float, default=defaults.tokens_per_s, help="per request; or inf")
    parser.add_argument("--tokens-per-chunk", type=int, default=defaults.tokens_per_chunk, help="per SSE event")
    parser.add_argument(
        "--reply-tokens", type=int, default=defaults.reply_tokens, help="where a chat answer ends by itself"
    )
    parser.add_argument("--echo-body", action="store_true", help="the answer is the request body's sha256")


def _add_faults(parser: argparse.ArgumentParser) -> None:
    faults = parser.add_argument_group("faults")
    faults.add_argument("--crash-at-start", metavar="MESSAGE", help="log this as an error while starting, exit 1")
    faults.add_argument(
        "--oom",
        nargs="?",
        const="kv-cache",
        choices=["kv-cache", "no-blocks", "memory"],
        help="refuse to start with one of vLLM's memory errors, exit 1",
    )
    faults.add_argument("--crash-after-requests", type=int, metavar="N", help="die when generation N+1 arrives")
    faults.add_argument("--crash-mid-stream", type=int, metavar="TOKENS", help="die after sending so many tokens")
    faults.add_argument("--hang-after-requests", type=int, metavar="N", help="generation N+1 and later never move")
    faults.add_argument(
        "--fault-once", metavar="FILE", help="only while FILE is absent; the fault makes it: a restart is healthy"
    )


def _add_life(parser: argparse.ArgumentParser, defaults: Options) -> None:
    life = parser.add_argument_group("life")
    life.add_argument("--ignore-sigterm-while-loading", action="store_true")
    life.add_argument("--ignore-sigterm", action="store_true")
    life.add_argument(
        "--shutdown-timeout", type=float, default=defaults.shutdown_timeout, help="seconds to drain on SIGTERM"
    )
    life.add_argument("--child", action="store_true", help="a VLLM::EngineCore process that outlives a kill -9")
