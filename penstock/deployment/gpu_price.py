"""What a GPU costs for an hour: from the deployment file, or from a price file that several deployments share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from penstock.deployment.planning import card_of
from penstock.errors import UserError
from penstock.hardware import Machine, catalog
from penstock.spec.deployment import Hardware

_HINT = "It has lines like `h100-sxm: 2.50`: a GPU of the catalogue, and US dollars an hour."


def find(hardware: Hardware, machine: Machine) -> float | None:
    """US dollars for an hour of one of the machine's GPUs; None without GPUs, or where no price is given.

    Reads hardware.price_file. Raises UserError.
    """
    if hardware.price_file is None:
        return hardware.price_per_gpu_hour if machine.gpus else None
    prices = _read(Path(hardware.price_file).expanduser())
    if not machine.gpus:
        return None
    card = card_of(machine.gpus)
    price = prices.get(card.id)
    if price is None:
        known = "hardware.price_per_gpu_hour" if card.stands_in else f"a line such as `{card.id}: 2.50`"
        raise UserError(
            f'cannot find a price for GPU "{card.id}" in "{hardware.price_file}"',
            detail=f"It has prices for {', '.join(prices) or 'no GPU'}.",
            hint=f"Add {known}.",
        )
    return price


def _read(path: Path) -> dict[str, float]:
    """Prices by the catalogue's ids. A name that it does not have is refused: nobody would see why it is not found."""
    import yaml

    try:
        raw: Any = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UserError(f'cannot read price file "{path}": {why}', hint=_HINT) from error
    if not isinstance(raw, dict):
        raise UserError(f'cannot use price file "{path}": it is no list of GPUs and prices', hint=_HINT)
    prices: dict[str, float] = {}
    for name, price in raw.items():
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < math.inf:
            raise UserError(f'cannot use price file "{path}": the price of {name} is {price!r}', hint=_HINT)
        try:
            prices[catalog.gpu(str(name)).id] = float(price)
        except UserError as error:
            raise UserError(f'cannot use price file "{path}": {error.message}', hint=error.hint) from error
    return prices
