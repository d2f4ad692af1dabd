"""An engine without a server: what a program beside it is told, and what it says, for benchmarks of the bare engine.

`python -m penstock.engines.vllm.offline JOB` and `llamacpp_offline` read a `Job`, run it, and write a `Done` to its
`answer` file; both files are JSON. Such a program may die of anything the engine dies of.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

# engine -> the program that runs it without a server
PROGRAMS = {"vllm": "penstock.engines.vllm.offline", "llamacpp": "penstock.engines.llamacpp.offline"}


class Job(msgspec.Struct, frozen=True):
    """What to run: all `prompts` at once (text, or token ids), each answered with exactly so many tokens.

    `words` is the engine's own command line after its program. The whole is done `n_warmup` times, then `n_times`, each
    timed by itself.
    """

    words: tuple[str, ...]
    prompts: tuple[str | tuple[int, ...], ...]
    output_tokens: tuple[int, ...]
    answer: str
    n_warmup: int = 0
    n_times: int = 1


class Done(msgspec.Struct, frozen=True):
    """Seconds of each timed round, and tokens of one round by the engine's own count."""

    seconds: tuple[float, ...]
    input_tokens: int
    output_tokens: int


class Counted(msgspec.Struct, frozen=True):
    """Tokens of one round."""

    input_tokens: int
    output_tokens: int


def read(path: str) -> Job:
    """The job in a file."""
    return msgspec.json.decode(Path(path).read_bytes(), type=Job)


def carry_out(job: Job, once: Callable[[], Counted]) -> None:
    """Warm up, time every round of `once`, write the answer."""
    for _ in range(job.n_warmup):
        once()
    seconds = []
    counted = Counted(0, 0)
    for _ in range(job.n_times):
        begun = time.perf_counter()
        counted = once()
        seconds.append(time.perf_counter() - begun)
    done = Done(tuple(seconds), counted.input_tokens, counted.output_tokens)
    Path(job.answer).write_bytes(msgspec.json.encode(done))
