"""Hand-made answers of the planner, for the tests of what shows them. The numbers are plausible, not computed."""

from __future__ import annotations

from penstock.models import Facts
from penstock.planner.ranges import Range
from penstock.planner.request import (
    KvAnswer,
    Lever,
    MemoryAnswer,
    RankMemory,
    RejectedLayout,
    Settings,
    Sizing,
    SizingRequest,
    SpeedAnswer,
    WeightsAnswer,
)
from penstock.planner.users import Users
from penstock.spec.deployment import Parallel


def spread(likely: float, low: float | None = None, high: float | None = None) -> Range:
    return Range(likely if low is None else low, likely, likely if high is None else high)


FACTS = Facts(
    "llama-3.1-70b", {"architectures": ["LlamaForCausalLM"]}, "the catalogue", hub_id="meta-llama/Llama-3.1-70B"
)
SETTINGS = Settings("0.33", "NVIDIA H100 80GB HBM3", 131072, 1024, 8192, 0.92, "bfloat16", "auto")
WEIGHTS = WeightsAnswer(141_107_412_992, 70_553_706_496, (32.86,))
KV = KvAnswer(327_680, 16, 30_105, 481_680, 3.67, 131_072, 10.0)
MEMORY = MemoryAnswer(
    total_gib=spread(79.11),
    budget_gib=spread(72.78),
    activation_gib=spread(2.12, 1.7, 2.6),
    cuda_graph_gib=spread(0.62, 0.3, 1.1),
    non_torch_gib=spread(0.41, 0.2, 0.6),
    kv_cache_gib=spread(36.75, 35.8, 37.7),
)
SPEED = SpeedAnswer(
    ttft_ms=spread(184.2, 130, 260),
    tpot_ms=spread(15.31, 11.5, 19.9),
    output_tokens_per_s=spread(492.1, 380, 640),
    requests_per_s=spread(2.461, 1.9, 3.2),
)

REQUEST = SizingRequest(
    facts=FACTS, gpu="h100-sxm", gpus_per_node=8, nodes=1, ttft_ms=500, tpot_ms=12, context_per_user=8000
)
FITS = Sizing(
    fits=True,
    reason="4 GPUs are the fewest that hold 131.42 GiB of weights and one request of 131,072 tokens "
    "(40.00 GiB of KV cache)",
    layout=Parallel(tensor=4),
    weights=WEIGHTS,
    kv=KV,
    memory=MEMORY,
    speed=SPEED,
    rejected=(
        RejectedLayout(1, 1, 1, False, "weights of 131.42 GiB a GPU, the budget is 72.78 GiB (0.92 of 79.11)"),
        RejectedLayout(
            *(2, 1, 1, False),
            "one request of 131,072 tokens needs 20.00 GiB of KV cache a GPU, 3.94 GiB are left; the longest that fits "
            "is 25,808 tokens",
        ),
        RejectedLayout(3, 1, 1, False, "64 attention heads do not divide by 3"),
        RejectedLayout(2, 2, 1, False, "fits, but TTFT is 263 ms, 43% over TP4"),
    ),
    warnings=("catalogue: this config has 8 KV heads; the first release had 16",),
    engine_args=("--tensor-parallel-size", "4", "--max-model-len", "131072", "--gpu-memory-utilization", "0.92"),
    settings=SETTINGS,
    ranks=(RankMemory("every GPU", 4, 32.86, 36.75, 2.12, 0.62, 0.41),),
    levers=(
        Lever("fp8 KV cache", ("--kv-cache-dtype", "fp8"), True, 963_360, 7.35),
        Lever("fp8 weights", ("--quantization", "fp8"), True, 694_500, 5.3, "needs a checkpoint, or 1% of quality"),
        Lever("context of 32,768", ("--max-model-len", "32768"), True, 481_680, 14.7),
        Lever("8 GPUs", ("--tensor", "8"), True, 1_420_000, 10.83),
    ),
    users=Users(
        spread(96, 60, 130),
        16,
        "KV cache for their conversations",
        spread(6.1, 5.2, 8.0),
        "8,000 tokens of context, 200 a reply, 20 s of thought between them",
    ),
)

# Two stages over two nodes: the second has less room, the first cannot use the rest.
PIPELINE_REQUEST = SizingRequest(
    facts=FACTS, gpu="a100-sxm4-40", gpus_per_node=4, nodes=3, network="ethernet-25g", tensor=4, pipeline=2
)
PIPELINE = Sizing(
    fits=True,
    reason="the layout asked for fits",
    layout=Parallel(tensor=4, pipeline=2),
    weights=WeightsAnswer(141_107_412_992, 70_553_706_496, (16.92, 16.92)),
    kv=KvAnswer(327_680, 16, 20_000, 320_000, 2.44, 131_072, 5.0),
    memory=MemoryAnswer(
        spread(39.39), spread(36.24), spread(3.4, 3, 4), spread(0.5, 0.3, 0.9), spread(0.4, 0.2, 0.6), spread(15.02)
    ),
    engine_args=("--tensor-parallel-size", "4", "--pipeline-parallel-size", "2"),
    ranks=(
        RankMemory("stage A", 4, 16.92, 15.02, 1.2, 0.5, 0.4, 2.2),
        RankMemory("stage B", 4, 16.92, 15.02, 3.4, 0.5, 0.4),
    ),
)

SHORT = Sizing(
    fits=False,
    reason="weights of 131.42 GiB a GPU, the budget is 72.78 GiB (0.92 of 79.11); 4 GPUs would do",
    layout=Parallel(),
    weights=WeightsAnswer(141_107_412_992, 70_553_706_496, (131.42,)),
    kv=KvAnswer(327_680, 16, 0, 0, 0.0, 0, 40.0),
    memory=MemoryAnswer(
        spread(79.11), spread(72.78), spread(2.12), spread(0.62), spread(0.41), spread(-61.79, -62.5, -61.0)
    ),
    settings=SETTINGS,
    ranks=(RankMemory("every GPU", 1, 131.42, -61.79, 2.12, 0.62, 0.41),),
    levers=(
        Lever("fp8 weights", ("--quantization", "fp8"), False, 0, 0.0),
        Lever("int4 weights (AWQ)", ("--quantization", "awq"), True, 100_000, 0.76, "needs a checkpoint in AWQ"),
    ),
)
ILLEGAL = Sizing(
    fits=False,
    reason="no legal layout: 64 attention heads do not divide by 3",
    rejected=(RejectedLayout(3, 1, 1, False, "64 attention heads do not divide by 3"),),
)
