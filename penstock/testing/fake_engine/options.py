"""What the fake engine was asked to do: the flags, as a frozen value."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

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
    compile_s: float = 0.0
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
    answers: str | None = None
    accepts_images: bool = False
    enable_prompt_tokens_details: bool = False
    enable_sleep_mode: bool = False
    sleep_s: float = 0.0
    wake_s: float = 0.0
    refuse_wake: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names it answers to; the first is the one it gives itself in replies, as vLLM does."""
        return self.served_model_name or (self.model,)


def parse(argv: Sequence[str]) -> Options:
    flags = vars(_parser().parse_args(argv))
    flags["served_model_name"] = tuple(flags["served_model_name"])
    return Options(**{field.name: flags[field.name] for field in fields(Options)})


_HELP = {
    "port": "0 takes a free one and logs it",
    "max_num_seqs": "more requests wait",
    "load_s": "seconds from start to ready",
    "shards": "lines of loading progress",
    "compile_s": "seconds to compile, unless VLLM_CACHE_ROOT has what an earlier start compiled",
    "ttft_s": "seconds to the first token",
    "tokens_per_s": "per request; or inf",
    "tokens_per_chunk": "per SSE event",
    "reply_tokens": "where a chat answer ends by itself",
    "echo_body": "the answer is the request body's sha256",
    "answers": "a JSON file of answers by the last message",
    "accepts_images": "else a request with one gets vLLM's 400",
    "enable_prompt_tokens_details": "cached tokens in the usage, as with vLLM",
    "enable_sleep_mode": "as with vLLM; VLLM_SERVER_DEV_MODE=1 opens the routes",
    "sleep_s": "seconds to fall asleep",
    "wake_s": "seconds to wake up",
    "refuse_wake": "waking fails",
    "crash_at_start": "log this as an error while starting, exit 1",
    "oom": "refuse to start with one of vLLM's memory errors, exit 1",
    "crash_after_requests": "die when generation N+1 arrives",
    "crash_mid_stream": "die after sending so many tokens",
    "hang_after_requests": "generation N+1 and later never move",
    "fault_once": "only while this file is absent; the fault makes it: a restart is healthy",
    "shutdown_timeout": "seconds to drain on SIGTERM",
    "child": "a VLLM::EngineCore process that outlives a kill -9",
}
_TYPES: dict[str, type] = {"int": int, "float": float, "int | None": int}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m penstock.testing.fake_engine",
        description="An engine that speaks like vLLM and has no model. docs/how-to/testing.md explains every flag.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--served-model-name", nargs="+", default=[], metavar="NAME")
    choices = get_args(Refusal)
    parser.add_argument("--oom", nargs="?", const=choices[0], choices=choices, help=_HELP["oom"])
    for field in fields(Options):
        flag, text = f"--{field.name.replace('_', '-')}", _HELP.get(field.name, " ")
        if field.type == "bool":
            parser.add_argument(flag, action="store_true", help=text)
        elif field.name not in ("model", "served_model_name", "oom"):
            parser.add_argument(flag, type=_TYPES.get(str(field.type), str), default=field.default, help=text)
    return parser
