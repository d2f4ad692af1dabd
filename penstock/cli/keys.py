"""`penstock keys` and `penstock usage`: their arguments, and what they print. `store` answers."""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import UserError

if TYPE_CHECKING:
    from penstock.gateway.accounting.store import ApiKey, Grouping, Store, Usage

Price = tuple[float, float, float]  # US dollars per million input, output and cached tokens

# A running gateway looks for changed keys every 0.5 s (gateway/ledger.py): a key that was shown works.
SEEN_S = 0.6
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_PERIOD = re.compile(r"([0-9]{1,9})([smhdw])")
_GROUPINGS = ("key", "model", "day", "state", "replica")
_MOST = 2**53


def period_s(text: str) -> float:
    """Seconds in "90s", "45m", "12h", "30d" or "2w"."""
    found = _PERIOD.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f'"{text[:20]}" is not a time such as 90s, 45m, 12h, 30d or 2w')
    return float(found[1]) * _UNITS_S[found[2]]


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16 and 0 < int(text) < _MOST):
        raise argparse.ArgumentTypeError(f'"{text[:20]}" is not a whole number above 0')
    return int(text)


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f'"{text[:20]}" is not an amount')
    return value


def _price(text: str) -> tuple[str, Price]:
    """("m", (0.5, 1.5, 0.1)) for "m=0.5/1.5/0.1"; without the third, cached tokens cost what others do."""
    model, _, amounts = text.rpartition("=")
    parts = [_amount(part) for part in amounts.split("/")]
    if not model or len(parts) not in (2, 3):
        raise argparse.ArgumentTypeError(f'"{text[:60]}" is not MODEL=INPUT/OUTPUT or MODEL=INPUT/OUTPUT/CACHED')
    return model, (parts[0], parts[1], parts[-1] if len(parts) == 3 else parts[0])


def _day(text: str) -> float:
    """The beginning (UTC) of a day such as 2026-11-20."""
    try:
        return datetime.datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=datetime.UTC).timestamp()
    except ValueError:
        raise argparse.ArgumentTypeError(f'"{text[:20]}" is not a day such as 2026-11-20') from None


def _groupings(text: str) -> tuple[str, ...]:
    by = tuple(part for part in text.split(",") if part)
    wrong = [part for part in by if part not in _GROUPINGS]
    if wrong or len(set(by)) != len(by):
        raise argparse.ArgumentTypeError(f'"{text[:60]}" is not a list of {", ".join(_GROUPINGS)}')
    return by


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _add_place(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--store", metavar="FILE|URL", help="an SQLite file or postgresql://... ($PENSTOCK_STORE)")
    sub.add_argument(
        "--deployment", metavar="NAME", help="that deployment's store (default: the only deployment that runs)"
    )


def add_keys_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("action", choices=("create", "list", "rotate", "revoke"), help="rotate: a new secret, same limits")
    sub.add_argument("key", nargs="?", metavar="NAME|ID", help="which key to rotate or revoke, or the new one's name")
    sub.add_argument("--name", help="create: whom the key is for")
    sub.add_argument("--models", type=_names, default=(), metavar="M,M", help="create: only these (default: all)")
    sub.add_argument("--rpm", type=_count, metavar="N", help="create: requests a minute")
    sub.add_argument("--tpm", type=_count, metavar="N", help="create: tokens a minute, prompt and answer")
    sub.add_argument("--concurrency", type=_count, metavar="N", help="create: requests at once")
    sub.add_argument("--budget", type=_amount, metavar="USD", help="create: dollars a calendar month (UTC)")
    sub.add_argument("--expires", type=period_s, metavar="TIME", help="create: good for this long, such as 30d")
    sub.add_argument(
        "--grace", type=period_s, default=0.0, metavar="TIME", help="rotate: the old one stays good so long"
    )
    _add_place(sub)
    sub.add_argument("--json", action="store_true", help="print JSON")


def add_usage_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "action", nargs="?", choices=("prune",), help="prune: replace old requests by their sums, day for day"
    )
    sub.add_argument("--before", type=_day, metavar="DAY", help="prune: requests from before this day (UTC)")
    sub.add_argument("--keep", type=period_s, metavar="TIME", help="prune: requests that are older, such as 90d")
    sub.add_argument("--by", type=_groupings, default=("key", "model"), metavar="A,B", help=", ".join(_GROUPINGS))
    sub.add_argument("--since", type=period_s, metavar="TIME", help="only the last 7d, 12h, ... (default: all)")
    sub.add_argument(
        "--price",
        action="append",
        type=_price,
        default=[],
        metavar="M=IN/OUT",
        help="dollars per million tokens of a model, M=0.5/1.5 or with cached ones M=0.5/1.5/0.1, in place of those"
        " the gateway had",
    )
    _add_place(sub)
    form = sub.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print CSV")
    form.add_argument("--json", action="store_true", help="print JSON")


def _open(options: argparse.Namespace, *, may_create: bool = False) -> Store:
    from penstock import run_folder
    from penstock.gateway.accounting import store

    if options.store is not None and options.deployment is not None:
        raise UserError("cannot use a store and a deployment at once", hint="Give --store or --deployment.")
    place = options.store or (None if options.deployment else os.environ.get("PENSTOCK_STORE"))
    if place is None:
        found = run_folder.choose(options.deployment)
        place = found.gateway_file().store
        if not isinstance(place, str):
            raise UserError(
                f'cannot use the store of deployment "{found.name}": it has none',
                hint="An older penstock started it; penstock up --replace gives it one.",
            )
        may_create = True
    if not may_create and not store.is_postgres(place) and not Path(place).is_file():
        raise UserError(f'cannot find store "{place[:200]}"', hint="penstock keys create --store makes one.")
    return store.Store(place)


def run_keys(options: argparse.Namespace) -> int:
    """The verb `keys`. A new secret is all that stands on standard output; what people read goes to standard error."""
    from penstock.gateway.accounting.store import Limits, check_new_key

    now = time.time()
    if options.action == "create":
        name = options.name or options.key
        if name is None or (options.name and options.key):
            raise UserError("cannot create a key without one name", hint="penstock keys create --name NAME")
        expires_at = None if options.expires is None else now + options.expires
        numbers = (options.rpm, options.tpm, options.concurrency, options.budget)
        limits = Limits(options.models, *numbers, expires_at)
        check_new_key(name, limits, now)
        opened = _open(options, may_create=True)
        made = opened.create_key(name, limits, now)
        time.sleep(SEEN_S)
        _show_secret(*made, options.json)
        return 0
    opened = _open(options)
    if options.action == "list":
        _show_keys(opened.all_keys(), now, options.json)
        return 0
    if options.key is None:
        raise UserError(f"cannot {options.action} a key without its name", hint=f"penstock keys {options.action} NAME")
    if options.action == "rotate":
        made = opened.rotate_key(options.key, options.grace, now)
        time.sleep(SEEN_S)
        _show_secret(*made, options.json)
        return 0
    key = opened.revoke_key(options.key, now)
    time.sleep(SEEN_S)
    if options.json:
        print(json.dumps(_key_facts(key, now)))
    else:
        print(f"{key.name} ({key.id}) is revoked", file=sys.stderr)
    return 0


def _show_secret(key: ApiKey, secret: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**_key_facts(key, time.time()), "key": secret}))
        return
    print(secret)
    limits = _limits_text(key)
    print(f"key {key.name} ({key.id}){f': {limits}' if limits else ''}; it is shown this once", file=sys.stderr)


def _key_facts(key: ApiKey, now: float) -> dict[str, Any]:
    import msgspec

    return {
        "id": key.id,
        "name": key.name,
        "state": _key_state(key, now),
        "secrets": [f"sk-...{secret.ending}" for secret in key.secrets if not _is_over(secret.expires_at, now)],
        **msgspec.to_builtins(key.limits),
        "created_at": key.created_at,
        "revoked_at": key.revoked_at,
    }


def _is_over(until: float | None, now: float) -> bool:
    return until is not None and until <= now


def _key_state(key: ApiKey, now: float) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "expired" if _is_over(key.limits.expires_at, now) else "good"


def _limits_text(key: ApiKey) -> str:
    limits = key.limits
    parts = [
        f"models {','.join(limits.models)}" if limits.models else "",
        f"{limits.rpm} requests/min" if limits.rpm else "",
        f"{limits.tpm} tokens/min" if limits.tpm else "",
        f"{limits.concurrency} at once" if limits.concurrency else "",
        f"${limits.budget_usd:g}/month" if limits.budget_usd is not None else "",
        f"until {_moment(limits.expires_at)}" if limits.expires_at else "",
    ]
    return ", ".join(part for part in parts if part)


def _moment(at: float) -> str:
    return f"{datetime.datetime.fromtimestamp(at, datetime.UTC):%Y-%m-%d %H:%M} UTC"


def _show_keys(keys: Sequence[ApiKey], now: float, as_json: bool) -> None:
    if as_json:
        print(json.dumps([_key_facts(key, now) for key in keys]))
    elif not keys:
        print("there are no keys; make one: penstock keys create --name NAME")
    else:
        rows = [("NAME", "ID", "ENDS", "STATE", "CREATED", "LIMITS")]
        for key in keys:
            endings = ",".join(secret.ending for secret in key.secrets if not _is_over(secret.expires_at, now))
            rows.append((key.name, key.id, endings, _key_state(key, now), _moment(key.created_at), _limits_text(key)))
        print(_table(rows))


def run_usage(options: argparse.Namespace) -> int:
    """The verb `usage`: one line a group, and what it cost where that is known."""
    if options.action == "prune" or options.before is not None or options.keep is not None:
        return _prune(options)
    opened = _open(options)
    since = 0.0 if options.since is None else time.time() - options.since
    lines = _priced(opened, options.by, since, dict(options.price))
    columns = (*options.by, "requests", "prompt_tokens", "cached_tokens", "output_tokens", "estimates", "cost_usd")
    rows = [
        (*line.group, line.n_requests, line.prompt_tokens, line.cached_tokens, line.output_tokens)
        + (line.n_estimates, None if line.cost_usd is None else round(line.cost_usd, 6))
        for line in lines
    ]
    if options.json:
        print(json.dumps([dict(zip(columns, row, strict=True)) for row in rows]))
    elif options.csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
    elif not rows:
        print("no request yet")
    else:
        heads = tuple(column.upper().replace("_", " ") for column in columns)
        print(_table([heads, *(tuple("-" if value in (None, "") else str(value) for value in row) for row in rows)]))
    return 0


def _prune(options: argparse.Namespace) -> int:
    """`usage prune`. A second one goes on where one that was killed has ended."""
    from penstock.gateway.accounting.store import DAY_S, day_of

    if options.action != "prune" or (options.before is None) == (options.keep is None):
        raise UserError("cannot prune usage without one limit", hint="penstock usage prune --keep 90d, or --before DAY")
    before = options.before if options.keep is None else time.time() - options.keep
    # Today goes on: gateways add to it.
    before = max(0.0, min(before, time.time())) // DAY_S * DAY_S
    opened = _open(options)
    n_rows = 0
    while n_pruned := opened.prune(before):
        n_rows += n_pruned
    opened.compact()
    if options.json:
        print(json.dumps({"before": day_of(before), "requests": n_rows}))
    else:
        print(f"{n_rows} requests from before {day_of(before)} (UTC) are kept as sums by day")
    return 0


def _priced(opened: Store, by: tuple[Grouping, ...], since: float, prices: dict[str, Price]) -> list[Usage]:
    """The usage with the cost by the given prices, for the models that have one."""
    from penstock.gateway.accounting.store import Usage

    if not prices:
        return opened.usage(by, since)
    found: dict[tuple[str, ...], Usage] = {}
    for line in opened.usage((*by, "model") if "model" not in by else by, since):
        model = line.group[by.index("model")] if "model" in by else line.group[-1]
        group = line.group[: len(by)]
        before = found.get(group, Usage(group, 0, 0, 0, 0, 0, None))
        found[group] = Usage(
            group,
            before.n_requests + line.n_requests,
            before.prompt_tokens + line.prompt_tokens,
            before.cached_tokens + line.cached_tokens,
            before.output_tokens + line.output_tokens,
            before.n_estimates + line.n_estimates,
            _sum(before.cost_usd, _cost(line, prices[model]) if model in prices else line.cost_usd),
        )
    return list(found.values())


def _cost(line: Usage, price: Price) -> float:
    fresh_tokens = line.prompt_tokens - line.cached_tokens
    return (fresh_tokens * price[0] + line.output_tokens * price[1] + line.cached_tokens * price[2]) / 1e6


def _sum(first: float | None, second: float | None) -> float | None:
    return second if first is None else first if second is None else first + second


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)
