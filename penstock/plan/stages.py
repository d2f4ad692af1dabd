"""Which layers stand on which pipeline stage."""

from __future__ import annotations


def split_layers(n_layers: int, pipeline: int) -> tuple[range, ...]:
    """The layers of each stage, as vLLM cuts them (`distributed/utils.py`, `get_pp_indices`).

    n_layers // pipeline each; the remainder goes one by one to the stages from the second-last backwards, never to the
    last, which has the head. 61 layers over 4 stages: 15, 15, 16, 15. Over 2: 31, 30.
    """
    sizes = [n_layers // pipeline] * pipeline
    for step in range(2, n_layers % pipeline + 2):
        sizes[-step] += 1
    ends = [sum(sizes[: stage + 1]) for stage in range(pipeline)]
    return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))
