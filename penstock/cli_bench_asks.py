"""What the verbs of `penstock bench` share: asks from flags, and the planner's calibration file from runs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import UserError

if TYPE_CHECKING:
    from penstock.bench.ask import Ask
    from penstock.bench.record import Result


class Subparsers(Protocol):
    """What `argparse` gives for sub-commands; its own class is private."""

    def add_parser(self, name: str, **words: Any) -> argparse.ArgumentParser: ...


def asks_of(
    options: argparse.Namespace, n_requests: int, model: str | None, url: str | None, served: str | None = None
) -> list[Ask]:
    """The asks of one run; counted by the model's tokenizer, or else by the server, which knows it as `served`.

    Raises UserError.
    """
    from penstock.bench import data
    from penstock.bench.files import Wanted
    from penstock.bench.tokens import Tokens, tokens_of
    from penstock.client import Client

    wanted = Wanted(
        n_requests,
        options.seed,
        options.input_tokens,
        options.output_tokens,
        chat=options.endpoint == "chat",
    )

    def tokens() -> Tokens:
        client = Client(url, api_key=os.environ.get("OPENAI_API_KEY")) if url else None
        return tokens_of(options.tokenizer or model, client, served)

    return data.from_spec(dataset(options), wanted, tokens)


def dataset(options: argparse.Namespace) -> str:
    """--dataset, or --prompt as one.  Raises UserError for both."""
    if options.prompt is not None and options.dataset != "random":
        raise UserError("cannot use --prompt and --dataset at once", hint="Give one of them.")
    return f"prompt:{options.prompt}" if options.prompt is not None else str(options.dataset)


def only_model(url: str, key: str | None) -> str:
    """The name of the server's model.  Raises UserError when it has none, or several."""
    from penstock.client import Client

    names = [card.name for card in Client(url, api_key=key, timeout_s=10.0).models()]
    if len(names) != 1:
        raise UserError(f"cannot choose a model: the server has {len(names)}", hint=f"--model, one of {names[:20]}")
    return names[0]


def calibrated(options: argparse.Namespace, runs: Sequence[Result]) -> str:
    """The text of the planner's calibration file.  Raises UserError."""
    from penstock import catalog, facts, machine, planning
    from penstock.bench import calibrate
    from penstock.plan import calibration
    from penstock.spec import Parallel

    if options.calibrate_model is None:
        raise UserError("cannot calibrate without the model's name", hint="--calibrate-model llama-3.1-8b")
    if options.gpu is None and not (here := machine.gpus()):
        raise UserError("cannot calibrate: this machine has no GPU, and none was named", hint="--gpu h100-sxm")
    card = catalog.gpu(options.gpu) if options.gpu else planning.card_of(here)
    sizes = dict(zip(("tensor", "pipeline", "data"), options.layout, strict=False))
    deployed = calibrate.Deployed(
        facts.read(options.calibrate_model), card, Parallel(**sizes), str(options.engine_version)
    )
    return calibration.write(calibrate.calibrated(runs, deployed))


def write_calibration(options: argparse.Namespace, runs: Sequence[Result]) -> Path:
    """Fit and write; the file.  Raises UserError."""
    write(options.calibrate, calibrated(options, runs))
    return Path(options.calibrate)


def write(path: Path, text: str) -> None:
    """Raises UserError."""
    try:
        path.write_text(text, "utf-8")
    except OSError as exc:
        raise UserError(f'cannot write "{path}": {exc.strerror}') from exc
