"""What the verbs of `penstock bench` share: requests from their flags, and files."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import UserError

if TYPE_CHECKING:
    from penstock.bench.datasets.files import Wanted
    from penstock.bench.datasets.tokenizers import Tokens
    from penstock.bench.load.arrivals import PlannedRequest
    from penstock.wire.client import Client

# Warm-up prompts are drawn by a seed that no measured run has: what is sent twice is answered from the prefix cache.
WARMUP_SEED = 2**40


def requests_of(
    options: argparse.Namespace, wanted: Wanted, n_warmup: int, model: str | None, client: Client, served: str
) -> tuple[list[PlannedRequest], list[PlannedRequest]]:
    """The requests of one run and of its warm-up, of the data set that the flags name.  Raises UserError."""
    from penstock.bench.datasets.tokenizers import tokens_of

    dataset = options.dataset
    if options.prompt is not None:
        if dataset != "random":
            raise UserError("cannot use --prompt and --dataset at once", hint="Give one of them.")
        dataset = f"prompt:{options.prompt}"
    tokens = functools.cache(lambda: tokens_of(options.tokenizer or model, client, served))
    return drawn(dataset, wanted, n_warmup, tokens)


def drawn(
    dataset: str, wanted: Wanted, n_warmup: int, tokens: Callable[[], Tokens]
) -> tuple[list[PlannedRequest], list[PlannedRequest]]:
    """The requests of a run and those of its warm-up, which are others wherever texts are drawn.  Raises UserError."""
    import msgspec

    from penstock.bench.datasets import synthetic

    before = msgspec.structs.replace(wanted, n_requests=n_warmup, seed=WARMUP_SEED + wanted.seed)
    requests = synthetic.from_spec(dataset, wanted, tokens)
    return requests, synthetic.from_spec(dataset, before, tokens) if n_warmup else []


def client_of(url: str, key: str | None, is_insecure: bool = False) -> Client:
    from penstock.wire.client import Client

    return Client(url, api_key=key, timeout_s=10.0, is_insecure=is_insecure)


def only_model(client: Client) -> str:
    names = [card.name for card in client.models()]
    if len(names) != 1:
        raise UserError(f"cannot choose a model: the server has {len(names)}", hint=f"--model, one of {names[:20]}")
    return names[0]


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as exc:
        raise UserError(f'cannot write "{path}": {exc.strerror}') from exc
