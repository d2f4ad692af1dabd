"""What the autoscaler says of a deployment: a part of its state, which every verb reads."""

from __future__ import annotations

import msgspec


class Scaling(msgspec.Struct, frozen=True):
    """The autoscaler's last word: how many `replicas`, of `least` to `most`, and why. `ready_at`: when the next of them
    is expected to be ready (Unix seconds), None while none starts. `failure`: why the last start failed. `published`:
    where another autoscaler sets the number, what it is asked for."""

    replicas: int
    least: int
    most: int
    reason: str = ""
    is_pinned: bool = False
    ready_at: float | None = None
    failure: str | None = None
    published: int | None = None
