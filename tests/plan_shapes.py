"""Models as the planner sees them, written by hand from their config.json, for the tests of cache and overhead."""

from __future__ import annotations

from penstock.planner.architecture import Architecture, Attention, AttentionKind, Layer, Mlp, State


def attention(
    kind: AttentionKind, heads: int, kv_heads: int, size: int, window: int | None = None, shares: int | None = None
) -> Attention:
    return Attention(kind, heads, kv_heads, size, size, window, shares_kv_with=shares)


def mla(heads: int = 128, index_dim: int = 0) -> Attention:
    return Attention("mla", heads, 1, 192, 128, q_lora_rank=1536, kv_lora_rank=512, rope_dim=64, index_dim=index_dim)


def model(name: str, hidden: int, vocab: int, layers: list[Layer], max_position: int = 131_072) -> Architecture:
    return Architecture(name, name, hidden, vocab, tuple(layers), max_position, "bfloat16", ties_embeddings=False)


def dense(
    name: str, n_layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocab: int = 128_256, size: int = 128
) -> Architecture:
    layer = Layer(attention("full", heads, kv_heads, size), mlp=Mlp(mlp))
    return model(name, hidden, vocab, [layer] * n_layers)


def alternating(
    name: str, n_layers: int, is_full: set[int], local: Attention, full: Attention, mlp: Mlp, hidden: int, vocab: int
) -> Architecture:
    layers = [Layer(full if index in is_full else local, mlp=mlp) for index in range(n_layers)]
    return model(name, hidden, vocab, layers)


LLAMA_8B = dense("llama-3.1-8b", 32, 4096, 32, 8, 14336)
LLAMA_70B = dense("llama-3.1-70b", 80, 8192, 64, 8, 28672)
LLAMA_405B = dense("llama-3.1-405b", 126, 16384, 128, 8, 53248)
LLAMA_405B_FIRST = dense("llama-3.1-405b, July 2024", 126, 16384, 128, 16, 53248)
LLAMA_2_7B = dense("llama-2-7b", 32, 4096, 32, 32, 11008, vocab=32_000)
QWEN2_5_32B = dense("qwen2.5-32b", 64, 5120, 40, 8, 27648, vocab=152_064)
QWEN3_0_6B = dense("qwen3-0.6b", 28, 1024, 16, 8, 3072, vocab=151_936)
QWEN3_8B = dense("qwen3-8b", 36, 4096, 32, 8, 12288, vocab=151_936)
QWEN3_32B = dense("qwen3-32b", 64, 5120, 64, 8, 25600, vocab=151_936)
QWEN3_4B = dense("qwen3-4b", 36, 2560, 32, 8, 9728, vocab=151_936)
DEEPSEEK_V3 = model("deepseek-v3", 7168, 129_280, [Layer(mla(), mlp=Mlp(2048, True, 256, 8, 2048))] * 61, 163_840)
DEEPSEEK_V32 = model("deepseek-v3.2", 7168, 129_280, [Layer(mla(index_dim=128), mlp=Mlp(2048, True, 256, 8))] * 61)
GPT_OSS_20B = alternating(
    "gpt-oss-20b",
    24,
    set(range(1, 24, 2)),
    attention("sliding", 64, 8, 64, 128),
    attention("full", 64, 8, 64),
    Mlp(2880, True, 32, 4),
    2880,
    201_088,
)
GEMMA_3_27B = alternating(
    "gemma-3-27b",
    62,
    set(range(5, 62, 6)),
    attention("sliding", 32, 16, 128, 1024),
    attention("full", 32, 16, 128),
    Mlp(21504),
    5376,
    262_208,
)
# Gemma 4: sliding layers of 16 x 256, full ones of 4 x 512: pages of two sizes.
GEMMA_4_31B = alternating(
    "gemma-4-31b",
    60,
    set(range(5, 60, 6)),
    attention("sliding", 32, 16, 256, 1024),
    attention("full", 32, 4, 512),
    Mlp(21504),
    5376,
    262_144,
)
LLAMA_4_SCOUT = alternating(
    "llama-4-scout",
    48,
    set(range(3, 48, 4)),
    attention("chunked", 40, 8, 128, 8192),
    attention("full", 40, 8, 128),
    Mlp(8192, True, 16, 1, 8192),
    5120,
    202_048,
)
MISTRAL_7B = model(
    "mistral-7b-v0.1", 4096, 32_000, [Layer(attention("sliding", 32, 8, 128, 4096), mlp=Mlp(14336))] * 32
)
# Full attention with more or fewer KV heads by layer (Nemotron Super).
MIXED_HEADS = model(
    "mixed heads",
    4096,
    32_000,
    [Layer(attention("full", 32, 8 if i % 2 else 4, 128), mlp=Mlp(8192)) for i in range(10)],
)
GDN = State("gdn", 8192, 4, 32, 128, 128, state_dtype="bfloat16", has_conv_bias=False)
QWEN3_NEXT = model(
    "qwen3-next-80b-a3b",
    2048,
    151_936,
    [
        Layer(attention("full", 16, 2, 256), mlp=Mlp(512, True, 512, 10, 512))
        if index % 4 == 3
        else Layer(state=GDN, mlp=Mlp(512, True, 512, 10, 512))
        for index in range(48)
    ],
)
# Granite 4.0-H-Small: 36 Mamba-2 layers (128 heads of 64, one group of 128) and 4 of attention.
GRANITE_STATE = State("mamba2", 8192 + 2 * 128, 4, 128, 64, 128, state_dtype="bfloat16")
GRANITE_4 = model(
    "granite-4.0-h-small",
    4096,
    100_352,
    [
        Layer(attention("full", 32, 8, 128), mlp=Mlp(768, True, 72, 10, 1536))
        if index in (5, 15, 25, 35)
        else Layer(state=GRANITE_STATE, mlp=Mlp(768, True, 72, 10, 1536))
        for index in range(40)
    ],
)
# Jamba v0.1: Mamba-1, 4 of 32 layers are attention.
_JAMBA = State("mamba1", 8192, 4, 8192, 1, 16, state_dtype="bfloat16")
JAMBA = model(
    "jamba-v0.1",
    4096,
    65_536,
    [Layer(attention("full", 32, 8, 128) if i % 8 == 4 else None, None if i % 8 == 4 else _JAMBA) for i in range(32)],
)
# Nemotron-H-56B: 118 layers, 54 Mamba-2 (256 heads of 64, 8 groups of 256), 10 attention, 54 MLP.
_NEMOTRON = State("mamba2", 16384 + 2 * 8 * 256, 4, 256, 64, 256)
NEMOTRON_H = model(
    "nemotron-h-56b",
    8192,
    131_072,
    [
        Layer(attention("full", 64, 8, 128))
        if i in range(7, 118, 12)
        else Layer(None, _NEMOTRON if i % 2 == 0 else None)
        for i in range(118)
    ],
)
# Every second half of the layers reads the cache of the first half.
SHARING = model(
    "sharing",
    2048,
    32_000,
    [Layer(attention("full", 16, 8, 128, shares=i - 10 if i >= 10 else None), mlp=Mlp(8192)) for i in range(20)],
)
EVERY = (
    LLAMA_8B,
    LLAMA_2_7B,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GPT_OSS_20B,
    GEMMA_3_27B,
    GEMMA_4_31B,
    LLAMA_4_SCOUT,
    MISTRAL_7B,
    MIXED_HEADS,
    QWEN3_NEXT,
    GRANITE_4,
    JAMBA,
    NEMOTRON_H,
    SHARING,
)
