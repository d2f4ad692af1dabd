"""`vllm bench throughput` and `vllm bench latency` (0.32 and 0.33) with the flags of a plan."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import msgspec

from penstock.engines import Command, Place
from penstock.engines.vllm import names
from penstock.engines.vllm.engine import PROGRAM, Vllm, engine_flags, pass_through
from penstock.errors import EngineError
from penstock.planner import Plan
from penstock.text import bare_flag

Verb = Literal["throughput", "latency"]
# Flags of `engine.args` that only vLLM's server has (vllm 0.33 `entrypoints/launchers/cli_args.py`): `vllm bench`
# refuses them, and none of them changes the engine.
_SERVER_FLAGS = """
allow-credentials allowed-headers allowed-methods allowed-origins anthropic-disabled-thinking-effort
api-server-count chat-template chat-template-content-format cohere-format cohere-is-reasoning-model
default-chat-template-kwargs disable-access-log-for-endpoints disable-fastapi-docs disable-log-requests
disable-uvicorn-access-log enable-auto-tool-choice enable-force-include-usage enable-log-deltas
enable-log-outputs enable-log-requests enable-offline-docs enable-per-request-metrics
enable-prompt-tokens-details enable-request-id-headers enable-scale-out enable-server-load-tracking
enable-ssl-refresh enable-tokenizer-info-endpoint exclude-tools-when-tool-choice-none fingerprint-mode
fingerprint-value grpc grpc-port log-error-stack lora-modules max-log-len middleware response-role
return-tokens-as-token-ids root-path sse-keep-alive-interval ssl-ca-certs ssl-cert-reqs ssl-certfile ssl-ciphers
ssl-keyfile tokens-only tool-call-parser tool-parser-plugin tool-server tool-strict-level
trust-request-chat-template trust-request-mm-kwargs uds uvicorn-log-level
"""
SERVER_FLAGS = frozenset(_SERVER_FLAGS.split())
_OUTPUT_TOKENS = re.compile(r"Total num output tokens:\s+(\d+)")  # printed, and not in the JSON


class Throughput(msgspec.Struct, frozen=True):
    """All prompts at once, by vLLM's names: seconds and tokens."""

    num_requests: int
    elapsed_time: float
    total_num_tokens: int
    requests_per_second: float
    tokens_per_second: float
    output_tokens: int = 0


class Latency(msgspec.Struct, frozen=True):
    """One batch again and again, by vLLM's names: seconds of each round, their percentiles ("50", "90", "99")."""

    avg_latency: float
    latencies: tuple[float, ...]
    percentiles: dict[str, float]


def command(plan: Plan, place: Place, verb: Verb, words: tuple[str, ...]) -> Command:
    """The command line of `vllm bench VERB`; its JSON goes to answer.json in the folder of `place`."""
    served = Vllm().command(plan, place)
    args = {key: value for key, value in plan.args.items() if bare_flag(key) not in SERVER_FLAGS}
    argv = [place.python, "-m", PROGRAM, "bench", verb, names.FLAGS["model"], plan.model.path]
    argv += [*engine_flags(plan), *pass_through(args), *words, "--output-json", str(_answer(place.folder))]
    return Command(tuple(argv), served.env, served.files)


def read(folder: str, verb: Verb, log: str) -> Throughput | Latency:
    """The numbers of a successful run.  Raises EngineError when it wrote none."""
    try:
        data = _answer(folder).read_bytes()
        if verb == "latency":
            return msgspec.json.decode(data, type=Latency)
        printed = _OUTPUT_TOKENS.search(log)
        throughput = msgspec.json.decode(data, type=Throughput)
        return msgspec.structs.replace(throughput, output_tokens=int(printed[1]) if printed else 0)
    except (OSError, msgspec.DecodeError) as exc:
        raise EngineError(f"could not read what vllm bench {verb} measured", detail=str(exc)) from exc


def _answer(folder: str) -> Path:
    return Path(folder) / "answer.json"
