"""The rows of /v1/models: OpenAI's id, vLLM's length, and what a penstock gateway adds. Pure."""

from __future__ import annotations

import msgspec

from penstock.errors import PenstockError
from penstock.wire.announcement import Progress


class ReplicaCount(msgspec.Struct, frozen=True):
    """Replicas of a model: those that take requests now, and all that announced themselves."""

    ready: int
    total: int


class ModelCard(msgspec.Struct, frozen=True, omit_defaults=True):
    """One model of a server; None where it does not say.

    `state`: "ready", "loading", "sleeping" (a request wakes it) or "unavailable". `max_model_len`: tokens of a prompt
    and its answer together. `progress`: of the replica that is nearest to ready, while none is. `input_modalities`:
    ("text", "image"); empty where it does not say.
    """

    name: str = msgspec.field(name="id")
    state: str | None = None
    aliases: tuple[str, ...] = ()
    max_model_len: int | None = None
    replicas: ReplicaCount | None = None
    progress: Progress | None = None
    input_modalities: tuple[str, ...] = ()


def read_models(answer: object, source: str) -> tuple[ModelCard, ...]:
    """The rows of an answer of GET /v1/models. A row with odd fields keeps its name alone; PenstockError without a
    list."""
    rows = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(rows, list):
        raise PenstockError(f"cannot read the models of {source}: no list in its answer")
    return tuple(_read_row(row) for row in rows if isinstance(row, dict))


def _read_row(row: dict[object, object]) -> ModelCard:
    try:
        return msgspec.convert(row, ModelCard)
    except msgspec.ValidationError:
        return ModelCard(str(row.get("id")))
