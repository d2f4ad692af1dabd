"""What one replica can do of each work alone, which is what the autoscaler counts load in. Pure."""

from __future__ import annotations

import msgspec

from penstock.hardware.catalog import GpuFacts, LinkFacts
from penstock.planner import Throughput
from penstock.planner.request import Sizing, SizingRequest
from penstock.planner.solve import speed_of
from penstock.planner.speed.estimate import Speed

# More at once than this makes steps longer and hardly any more tokens.
_MOST_AT_ONCE = 256


def throughput(
    request: SizingRequest, sizing: Sizing, gpu: GpuFacts, network: LinkFacts | None = None
) -> Throughput | None:
    """Of the layout that was chosen; None where its speed is not known.

    A lone prompt of I tokens takes its TTFT t, so P = I / t prompt tokens/s. With as many requests of I and O tokens at
    once as fit and keep `tpot_ms`, r a second are done: each takes 1/r = I/P + O/D, which gives D.
    """
    if not sizing.fits or sizing.layout is None or sizing.kv is None:
        return None
    fixed = msgspec.structs.replace(request, **msgspec.structs.asdict(sizing.layout))

    def at(n_requests: int) -> Speed | None:
        return speed_of(msgspec.structs.replace(fixed, concurrency=n_requests), gpu, network)

    prompt, output = request.input_tokens, request.output_tokens
    room = int(sizing.kv.tokens // max(1, prompt + output)) * sizing.layout.data
    most = max(1, min(sizing.settings.max_num_seqs * sizing.layout.data, room))
    alone, n_requests = at(1), min(most, _MOST_AT_ONCE)
    full = at(n_requests)
    while full is not None and n_requests > 1 and full.tpot_ms.likely > (request.tpot_ms or float("inf")):
        n_requests //= 2
        full = at(n_requests)
    if alone is None or full is None:
        return None
    prefill = sizing.layout.data * prompt / (alone.ttft_ms.likely / 1000)
    left_s = 1 / full.requests_per_s.likely - prompt / prefill
    decode = output / left_s if left_s > 0 else full.output_tokens_per_s.likely
    return Throughput(round(prefill, 1), round(decode, 1), most)
