"""What the verbs of `penstock bench` share: asks from flags, and files."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import UserError

if TYPE_CHECKING:
    from penstock.bench.datasets.files import Wanted
    from penstock.bench.load.arrivals import Ask
    from penstock.wire.client import Client

# Warm-up prompts are drawn by a seed that no measured run has: what is sent twice is answered from the prefix cache.
WARMUP_SEED = 2**40


class Subparsers(Protocol):
    """What `argparse` gives for sub-commands; its own class is private."""

    def add_parser(self, name: str, **words: Any) -> argparse.ArgumentParser: ...


def asks_of(
    options: argparse.Namespace, wanted: Wanted, n_warmup: int, model: str | None, client: Client, served: str
) -> tuple[list[Ask], list[Ask]]:
    """The asks of one run and those of its warm-up, which are others wherever texts are drawn.

    Counted by the model's tokenizer, or else by the server, which knows it as `served`.  Raises UserError.
    """
    from penstock.bench.datasets import synthetic
    from penstock.bench.datasets.tokenizers import Tokens, tokens_of

    @functools.cache
    def tokens() -> Tokens:
        return tokens_of(options.tokenizer or model, client, served)

    return drawn(lambda part: synthetic.from_spec(dataset(options), part, tokens), wanted, n_warmup)


def drawn(make: Callable[[Wanted], list[Ask]], wanted: Wanted, n_warmup: int) -> tuple[list[Ask], list[Ask]]:
    """What `make` gives for the run, and for its warm-up."""
    import msgspec

    before = msgspec.structs.replace(wanted, n_requests=n_warmup, seed=WARMUP_SEED + wanted.seed)
    return make(wanted), make(before) if n_warmup else []


def dataset(options: argparse.Namespace) -> str:
    """--dataset, or --prompt as one.  Raises UserError for both."""
    if options.prompt is not None and options.dataset != "random":
        raise UserError("cannot use --prompt and --dataset at once", hint="Give one of them.")
    return f"prompt:{options.prompt}" if options.prompt is not None else str(options.dataset)


def client_of(url: str, key: str | None, is_insecure: bool = False) -> Client:
    """For what is asked before a run: the server's model, the tokens of a text."""
    from penstock.wire.client import Client

    return Client(url, api_key=key, timeout_s=10.0, is_insecure=is_insecure)


def only_model(client: Client) -> str:
    """The name of the server's model.  Raises UserError when it has none, or several."""
    names = [card.name for card in client.models()]
    if len(names) != 1:
        raise UserError(f"cannot choose a model: the server has {len(names)}", hint=f"--model, one of {names[:20]}")
    return names[0]


def write(path: Path, text: str) -> None:
    """Raises UserError."""
    try:
        path.write_text(text, "utf-8")
    except OSError as exc:
        raise UserError(f'cannot write "{path}": {exc.strerror}') from exc
