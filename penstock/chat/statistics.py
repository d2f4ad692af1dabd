"""What an answer took and cost, and the one line that shows it below the answer."""

from __future__ import annotations

import msgspec

from penstock.spec.gateway import Price
from penstock.text import show_seconds, show_usd
from penstock.wire.answers import Reply

STOPPED = "stopped"  # the finish reason of an answer that the person stopped
UNFINISHED = "unfinished"  # of one that grows, and of one whose page was closed or killed before its end
_ENDINGS = {
    "length": "cut off at max tokens",
    "content_filter": "cut off by a filter",
    **{own: own for own in (STOPPED, UNFINISHED)},
}


class Statistics(msgspec.Struct, frozen=True):
    """Of one answer; None where the server did not say. `cached_tokens`: of the prompt, those that the KV cache held.

    `ttft_s`: from the request to the first piece; `tokens_per_s`: of the pieces after it; `duration_s`: of the whole.
    """

    ttft_s: float | None = None
    tokens_per_s: float | None = None
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    replica: str | None = None
    cost_usd: float | None = None
    finish_reason: str | None = None
    duration_s: float | None = None
    request_id: str | None = None


def of_reply(reply: Reply, price: Price | None = None) -> Statistics:
    """The figures of a whole answer. A cost needs a price and both counts of the server's usage."""
    cost_usd = None
    if price is not None and reply.prompt_tokens is not None and reply.output_tokens is not None:
        cost_usd = price.cost_usd(reply.prompt_tokens, reply.cached_tokens or 0, reply.output_tokens)
    return Statistics(
        ttft_s=reply.ttft_s,
        tokens_per_s=reply.tokens_per_s,
        output_tokens=reply.output_tokens,
        prompt_tokens=reply.prompt_tokens,
        cached_tokens=reply.cached_tokens,
        replica=reply.replica,
        cost_usd=cost_usd,
        finish_reason=reply.finish_reason,
        duration_s=reply.duration_s,
        request_id=reply.request_id,
    )


def line(statistics: Statistics) -> str:
    """ "TTFT 210 ms · 46 tok/s · 312 tokens · 18 in (12 cached) · $0.0004 · replica 1", without what is not known.
    An answer that did not end by itself says so."""
    parts = []
    if statistics.ttft_s is not None:
        parts.append(f"TTFT {show_seconds(statistics.ttft_s)}")
    if (rate := statistics.tokens_per_s) is not None:
        parts.append(f"{rate:.3g} tok/s" if rate < 100 else f"{rate:.0f} tok/s")
    if (n_tokens := statistics.output_tokens) is not None:
        parts.append("1 token" if n_tokens == 1 else f"{n_tokens} tokens")
    if statistics.prompt_tokens is not None:
        cached = f" ({statistics.cached_tokens} cached)" if statistics.cached_tokens is not None else ""
        parts.append(f"{statistics.prompt_tokens} in{cached}")
    if statistics.cost_usd is not None:
        parts.append(show_usd(statistics.cost_usd))
    if statistics.replica is not None:
        parts.append(f"replica {statistics.replica.removeprefix('replica').lstrip(' -') or statistics.replica}")
    if (ending := _ENDINGS.get(statistics.finish_reason or "")) is not None:
        parts.append(ending)
    return " · ".join(parts)
