"""The KV cache to the block: what vLLM would allocate, print and refuse for a given amount of memory.

Theory of operation, after `v1/core/kv_cache_utils.py` (`kv_cache_planning.py` from 0.33). All layers draw blocks from
one pool of equal blocks. Layers that look alike share a block table: a *group*. If a model's layers differ, their pages
are first made equally large (more tokens in a block of a small page, or padding), then cut into groups of equally many
layers, so that one block of any group has the same bytes. A request takes blocks from every group: for all its tokens
where attention is full, for a window where it slides, one or two where there is a state. The pool has as many blocks as
the smallest pipeline stage can hold. Concurrency is the pool over the blocks of one request at max_model_len.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import msgspec

from penstock.errors import not_modelled
from penstock.planner.architecture import Architecture
from penstock.planner.engine_versions import EngineProfile
from penstock.planner.memory.kv_pages import Cache, CacheSettings, Page, caches_of
from penstock.planner.memory.tensors import split_layers
from penstock.spec.deployment import Parallel
from penstock.text import GIB, MIB


class Group(msgspec.Struct, frozen=True):
    """Layers with one block table. `has_own_pages`: their pages differ, and a block holds one of each."""

    caches: tuple[Cache, ...]
    has_own_pages: bool = False


class KvPlan(msgspec.Struct, frozen=True):
    """The KV cache of one data-parallel rank. Bytes are of one GPU, of the fullest stage.
    `bytes_per_token`: every attention layer counted for every token; `tokens` is vLLM's "GPU KV cache size",
    `max_concurrency` its "Maximum concurrency". `request_bytes`: one request of max_model_len. `largest_max_model_len`:
    the longest context (up to the model's own) that one request could have."""

    bytes_per_token: int
    block_size: int
    num_blocks: int
    request_blocks: int
    bytes_per_block: tuple[int, ...]
    tokens: int
    max_concurrency: float
    request_bytes: int
    largest_max_model_len: int
    n_groups: int
    refusal: str | None = None


def kv_plan(
    arch: Architecture,
    layout: Parallel,
    rules: EngineProfile,
    settings: CacheSettings,
    available_bytes: Sequence[int],
    groups: tuple[Group, ...] | None = None,
) -> KvPlan:
    """What vLLM makes of `available_bytes` of KV cache on a GPU of each pipeline stage (one value holds for all). H200,
    Llama-3.1-8B, max_model_len 8192, 110.98 GiB: 56,821 blocks of 16 tokens, 909,136 tokens, 110.98 requests at once.
    `groups` of the same model, settings and tensor size save a second count.  Raises NotModelled and UserError."""
    if groups is None:
        groups = groups_of(caches_of(arch, rules, settings, layout.tensor), rules)
    stages = split_layers(arch.n_layers, layout.pipeline)
    per_block = tuple(
        max((sum(c.page.page_bytes for c in group.caches if c.layer in stage) for group in groups), default=0)
        for stage in stages
    )
    batches = _batches_in_flight(arch, rules, layout.pipeline)
    available = tuple(available_bytes) * (layout.pipeline if len(available_bytes) == 1 else 1)
    if len(available) != layout.pipeline:
        raise ValueError(f"{len(available)} amounts of memory for {layout.pipeline} pipeline stages")
    pool = _Pool(groups, stages, per_block, available, rules, settings, batches)
    one = request_blocks(groups, settings, settings.max_model_len, batches)
    concurrency = pool.num_blocks / one if one else 0.0
    firsts = [group.caches[0].page for group in groups]
    held = [cache for group in groups for cache in group.caches if cache.page.kind != "state"]
    sizes = [page.block_size for page in firsts]
    tokens = int(concurrency * settings.max_model_len)
    if groups and not rules.prints_concurrency:
        tokens = pool.num_blocks // len(groups) * min(sizes)
    limit = max(arch.max_position, settings.max_model_len)
    return KvPlan(
        bytes_per_token=max(sum(c.page.page_bytes // c.page.block_size for c in held if c.layer in s) for s in stages),
        block_size=min([page.block_size for page in firsts if page.kind != "state"] or sizes, default=16),
        num_blocks=pool.num_blocks,
        request_blocks=one,
        bytes_per_block=per_block,
        tokens=tokens,
        max_concurrency=concurrency,
        request_bytes=one * max(per_block),
        largest_max_model_len=bisect.bisect_left(range(1, limit + 1), True, key=lambda n: pool.lacks(n) is not None),
        n_groups=len(groups),
        refusal=pool.refusal(one),
    )


class _Pool(msgspec.Struct, frozen=True):
    """The blocks of one data-parallel rank over its pipeline stages."""

    groups: tuple[Group, ...]
    stages: tuple[range, ...]
    per_block: tuple[int, ...]
    available: tuple[int, ...]
    rules: EngineProfile
    settings: CacheSettings
    batches: int

    @property
    def num_blocks(self) -> int:
        """The smallest stage's; 1 (the null block) for a model without caches."""
        pairs = zip(self.available, self.per_block, strict=True)
        return min((max(0, memory) // block for memory, block in pairs if block), default=1)

    def lacks(self, n_tokens: int) -> int | None:
        """The first stage whose memory is less than one request of n_tokens needs, or None. Since 0.26 one block is
        held back (the null block); since 0.15 padded groups are counted, before it layers."""
        blocks = request_blocks(self.groups, self.settings, n_tokens, self.batches)
        for index, (block, memory) in enumerate(zip(self.per_block, self.available, strict=True)):
            needed = blocks * block
            if not self.rules.checks_groups:
                pages = [c.page for group in self.groups for c in group.caches if c.layer in self.stages[index]]
                needed = sum(_pages(page, self.settings, n_tokens, self.batches) * page.page_bytes for page in pages)
            usable = memory - block if self.rules.reserves_null_block else memory
            if block and (usable <= 0 or needed > usable):
                return index
        return None

    def refusal(self, blocks: int) -> str | None:
        if 0 in self.per_block and self.groups:
            # vLLM divides by the bytes of a block and ends with ZeroDivisionError.
            return f"pipeline stage {self.per_block.index(0)} would have no layer with a KV cache"
        short = self.lacks(self.settings.max_model_len)
        if short is None:
            return None
        needed, available = blocks * self.per_block[short], max(0, self.available[short])
        more = f" and one block more ({self.per_block[short] / MIB:.3g} MiB)" if needed <= available else ""
        # As many decimals (6 at most) as tell two different sizes apart.
        pairs = [(f"{needed / GIB:.{digits}f}", f"{available / GIB:.{digits}f}") for digits in range(2, 7)]
        shown, left = next((pair for pair in pairs if needed == available or pair[0] != pair[1]), pairs[-1])
        return (
            f"one request of {self.settings.max_model_len:,} tokens needs {shown} GiB of KV cache on a GPU{more}, "
            f"{left} GiB are available"
        )


def _batches_in_flight(arch: Architecture, rules: EngineProfile, pipeline: int) -> int:
    """Batches whose blocks are not yet freed (`config/vllm.py`, max_concurrent_batches)."""
    if not rules.counts_batches_in_flight:
        return 1
    if rules.uses_runner_v2(arch.is_moe_or_hybrid):
        return pipeline + 1
    return 2 if pipeline == 1 else pipeline


def request_blocks(groups: Sequence[Group], settings: CacheSettings, n_tokens: int, batches: int) -> int:
    """The sum over the groups of the largest page count."""
    total = 0
    for group in groups:
        unlike = group.caches if group.has_own_pages else group.caches[:1]
        total += max(_pages(cache.page, settings, n_tokens, batches) for cache in unlike)
    return total


def _pages(page: Page, settings: CacheSettings, n_tokens: int, batches: int) -> int:
    """Pages of one layer for a request of n_tokens; F are the tokens of all batches in flight.
    full: ceil(N / block). sliding W: ceil(min(W - 1 + F, N) / block) + 1. chunked C: ceil(min(C + F, N) / block)."""
    in_flight = batches * settings.max_num_batched_tokens
    if page.kind == "state":
        return page.n_states
    if page.kind == "sliding" and page.window is not None:
        return _ceil(min(page.window - 1 + in_flight, n_tokens), page.block_size) + 1
    if page.kind == "chunked" and page.window is not None:
        return _ceil(min(page.window + in_flight, n_tokens), page.block_size)
    return _ceil(n_tokens, page.block_size)


def groups_of(caches: Sequence[Cache], rules: EngineProfile) -> tuple[Group, ...]:
    """The caches in groups, as `get_kv_cache_groups` makes them; none for a model without caches."""
    held = tuple(caches)
    if not held:
        return ()
    if not rules.chunked_windows and {"chunked", "full"} <= {cache.page.kind for cache in held}:
        held = tuple(Cache(c.layer, msgspec.structs.replace(c.page, kind="full", window=None)) for c in held)
    if len(_buckets(held)) == 1:
        return (Group(held),)
    # `UniformTypeKVCacheSpecs`: the same tokens in a block, kind, window and (for states) page.
    pages = [cache.page for cache in held]
    if len({(p.kind, p.block_size, p.window, p.page_bytes if p.kind == "state" else 0) for p in pages}) == 1:
        return (Group(held, has_own_pages=True),)
    return _groups_of_equal_pages(_with_equal_pages(held), rules)


def _buckets(caches: Sequence[Cache]) -> list[list[Cache]]:
    buckets: dict[Page, list[Cache]] = {}
    for cache in caches:
        buckets.setdefault(cache.page, []).append(cache)
    return list(buckets.values())


def _with_equal_pages(caches: Sequence[Cache]) -> tuple[Cache, ...]:
    """Smaller pages get more tokens in a block when they divide the largest, else padding (not MLA)."""
    largest = max(cache.page.page_bytes for cache in caches)

    def equal(page: Page) -> Page:
        if page.page_bytes == largest:
            return page
        if page.kind != "state" and largest % page.page_bytes == 0:
            ratio = largest // page.page_bytes
            return msgspec.structs.replace(page, page_bytes=largest, block_size=page.block_size * ratio)
        if page.is_mla:
            raise not_modelled("attention", "mla", "mixed with pages that it does not divide")
        return msgspec.structs.replace(page, page_bytes=largest)

    return tuple(msgspec.structs.replace(cache, page=equal(cache.page)) for cache in caches)


def _groups_of_equal_pages(caches: Sequence[Cache], rules: EngineProfile) -> tuple[Group, ...]:
    """Buckets cut into groups of one size: the smallest bucket's, or the largest's when they are nearly equal.
    Layers are dealt out in turn (bucket[i::n]), so that every pipeline stage has some of each group."""
    buckets = _buckets(caches)
    smallest, largest = min(map(len, buckets)), max(map(len, buckets))
    size = largest if largest < smallest * rules.group_slack else smallest
    groups: list[Group] = []
    for bucket in buckets:
        n_groups = _ceil(len(bucket), size)
        groups.extend(Group(tuple(bucket[index::n_groups])) for index in range(n_groups))
    return tuple(groups)


def _ceil(number: int, step: int) -> int:
    return -(-number // step)
