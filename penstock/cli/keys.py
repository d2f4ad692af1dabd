"""The verbs `keys` and `usage`."""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import arguments
from penstock.cli.output import print_json, table
from penstock.errors import UserError
from penstock.text import show_seconds, show_usd

if TYPE_CHECKING:
    from penstock.gateway.accounting.key_store import ApiKey
    from penstock.gateway.accounting.store import Database
    from penstock.gateway.accounting.usage_store import GpuUse, Grouping, Usage, UsageStore
    from penstock.gateway.metrics.cost import GpuShare
    from penstock.run_folder import Run
    from penstock.spec.gateway import Price

# A running gateway reads changed keys every 0.5 s (gateway/accounting/ledger.py): a key that was shown works.
SEEN_S = 0.6
_OWNER_S = 12 * 3600.0  # the life of the owner's secret, and of the one before: no command ends another's chat
_GROUPINGS = ("key", "model", "day", "state", "replica")
_GPU_COLUMNS = ("gpu_cost_usd", "gpu_usd_per_million_tokens", "gpu_idle_share")
_limit, _amount = arguments.whole(1, 2**53 - 1), arguments.number(0)


def _price(text: str) -> tuple[str, Price]:
    """("m", Price(0.5, 1.5, 0.1)) for "m=0.5/1.5/0.1"."""
    from penstock.spec.gateway import Price

    model, _, amounts = text.rpartition("=")
    parts = [_amount(part) for part in amounts.split("/")]
    if not model or len(parts) not in (2, 3):
        raise arguments.refusal(text, "MODEL=INPUT/OUTPUT or MODEL=INPUT/OUTPUT/CACHED")
    return model, Price(*parts)


def _groupings(text: str) -> tuple[str, ...]:
    by = tuple(part for part in text.split(",") if part)
    if not set(by) <= set(_GROUPINGS) or len(set(by)) != len(by):
        raise arguments.refusal(text, f"a list of {', '.join(_GROUPINGS)}")
    return by


def _add_store(add: Callable[..., object]) -> None:
    add("--store", metavar="FILE|URL", help="an SQLite file or postgresql://... ($PENSTOCK_STORE)")
    text = "the store of that deployment (default: the only deployment that runs)"
    add("--deployment", metavar="NAME", help=text)


def register_keys(parser: argparse.ArgumentParser) -> None:
    add, time_s = parser.add_argument, arguments.period_s
    actions = ("create", "list", "rotate", "revoke")
    add("action", choices=actions, help="rotate: a new secret with the same limits")
    add("key", nargs="?", metavar="NAME|ID", help="the key to rotate or revoke, or the new key's name")
    add("--name", help="create: the name of the key")
    text = "create: the models it may use (default: all)"
    add("--models", type=arguments.names, default=(), metavar="M,M", help=text)
    add("--rpm", type=_limit, metavar="N", help="create: requests per minute")
    add("--tpm", type=_limit, metavar="N", help="create: tokens per minute, prompt and answer")
    add("--concurrency", type=_limit, metavar="N", help="create: requests at once")
    add("--budget", type=_amount, metavar="USD", help="create: dollars per calendar month (UTC)")
    add("--expires", type=time_s, metavar="TIME", help="create: the key expires after this time, such as 30d")
    add("--grace", type=time_s, default=0.0, metavar="TIME", help="rotate: the old secret stays valid this long")
    _add_store(add)
    arguments.add_json(parser)
    examples = (
        "penstock keys create --name alice --rpm 60 --expires 30d",
        "penstock keys list",
        "penstock keys rotate alice --grace 1h",
    )
    arguments.complete(parser, _run_keys, examples)


def register_usage(parser: argparse.ArgumentParser) -> None:
    add, time_s = parser.add_argument, arguments.period_s
    add("action", nargs="?", choices=("prune",), help="prune: replace the rows of old requests by one sum per day")
    add("--before", type=arguments.day, metavar="DAY", help="prune: requests before this day (UTC)")
    add("--keep", type=time_s, metavar="TIME", help="prune: requests older than this, such as 90d")
    add("--by", type=_groupings, default=("key", "model"), metavar="A,B", help=", ".join(_GROUPINGS))
    add("--since", type=time_s, metavar="TIME", help="only the last 7d, 12h, ... (default: all)")
    text = (
        "dollars per million tokens of a model, M=0.5/1.5, or with cached tokens M=0.5/1.5/0.1; replaces the price"
        " that the gateway used"
    )
    add("--price", action="append", type=_price, default=[], metavar="M=IN/OUT", help=text)
    _add_store(add)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print CSV")
    form.add_argument("--json", action="store_true", help="print JSON")
    examples = (
        "penstock usage --since 7d",
        "penstock usage --by key,day --price qwen=0.5/1.5 --csv",
        "penstock usage prune --keep 90d",
    )
    arguments.complete(parser, _run_usage, examples)


def address_and_key(run: Run) -> tuple[str, str | None]:
    """Where and with which key the deployment's owner asks it. Raises UserError where no replica would answer."""
    desired = run.desired()
    if desired.replicas == 0 and (desired.is_pinned or not run.deployment().replicas.follows_load):
        message = f'cannot ask deployment "{run.name}": it has no replica'
        raise UserError(message, hint=f"penstock scale {run.name} 1")
    return run.url, owner_key(run)


def owner_key(run: Run) -> str | None:
    """OPENAI_API_KEY, else that of key "owner", made by whoever can write the store; None where none is needed."""
    from penstock.deployment.events import asked_by
    from penstock.gateway.accounting import store
    from penstock.gateway.accounting.key_store import KeyStore

    if given := os.environ.get("OPENAI_API_KEY"):
        return given
    config = run.gateway_file()
    if run.deployment().gateway.auth == "none" or config.store is None:
        return None
    with contextlib.closing(store.connect(config.store)) as database:
        secret, is_new = KeyStore(database).keep("owner", run.owner_key_file, _OWNER_S, time.time())
    if is_new:
        run.add_event("key rotated", "owner, for a command that asks the deployment", who=asked_by())
        time.sleep(SEEN_S)
    return secret


def _place(options: argparse.Namespace) -> str | None:
    """The store that the command line or the environment names; None for that of a deployment."""
    if options.store is not None and options.deployment is not None:
        raise UserError("cannot use a store and a deployment at once", hint="Give --store or --deployment.")
    return options.store or (None if options.deployment else os.environ.get("PENSTOCK_STORE"))


def _open(options: argparse.Namespace, *, may_create: bool = False) -> Database:
    from penstock import run_folder
    from penstock.gateway.accounting import store

    place = _place(options)
    if place is None:
        run = run_folder.choose(options.deployment)
        place = run.gateway_file().store
        if not isinstance(place, str):
            message = f'cannot use the store of deployment "{run.name}": it has none'
            raise UserError(message, hint="An older penstock started it; `penstock up --replace` creates one.")
        may_create = True
    if not may_create and not store.is_postgres(place) and not Path(place).is_file():
        raise UserError(f'cannot find store "{place[:200]}"', hint="`penstock keys create --store` creates one.")
    return store.connect(place)


def _run_keys(options: argparse.Namespace) -> int:
    from penstock.gateway.accounting.key_store import KeyStore, Limits, check_new_key

    now = time.time()
    if options.action == "create":
        name = options.name or options.key
        if name is None or (options.name and options.key):
            raise UserError("cannot create a key without one name", hint="penstock keys create --name NAME")
        expires_at = None if options.expires is None else now + options.expires
        numbers = (options.rpm, options.tpm, options.concurrency, options.budget)
        limits = Limits(options.models, *numbers, expires_at)
        check_new_key(name, limits, now)
        store = KeyStore(_open(options, may_create=True))
        key, secret = store.create(name, limits, now)
        _note(options, "key created", key, _limits_text(key))
        _show_secret(key, secret, options.json)
        return 0
    store = KeyStore(_open(options))
    if options.action == "list":
        _show_keys(store.all(), now, options.json)
        return 0
    if options.key is None:
        raise UserError(f"cannot {options.action} a key without its name", hint=f"penstock keys {options.action} NAME")
    if options.action == "rotate":
        key, secret = store.rotate(options.key, options.grace, now)
        left = f"is valid for {show_seconds(options.grace)}" if options.grace else "has ended"
        _note(options, "key rotated", key, f"the old secret {left}")
        _show_secret(key, secret, options.json)
        return 0
    key = store.revoke(options.key, now)
    _note(options, "key revoked", key)
    time.sleep(SEEN_S)
    if options.json:
        print_json(_key_facts(key, now))
    else:
        print(f"{key.name} ({key.id}) is revoked", file=sys.stderr)
    return 0


def _note(options: argparse.Namespace, event: str, key: ApiKey, more: str = "") -> None:
    """For `penstock events`: a change of a deployment's store. A store that is named by itself has no deployment."""
    from penstock import run_folder
    from penstock.deployment.events import asked_by

    if _place(options) is None:
        text = ", ".join(filter(None, (f"{key.name} ({key.id})", more)))
        run_folder.choose(options.deployment).add_event(event, text, who=asked_by())


def _show_secret(key: ApiKey, secret: str, as_json: bool) -> None:
    time.sleep(SEEN_S)
    if as_json:
        print_json({**_key_facts(key, time.time()), "key": secret})
        return
    print(secret)
    limits = _limits_text(key)
    print(f"key {key.name} ({key.id}){f': {limits}' if limits else ''}; it is shown only this once", file=sys.stderr)


def _key_facts(key: ApiKey, now: float) -> dict[str, Any]:
    import msgspec

    return {
        "id": key.id,
        "name": key.name,
        "state": _key_state(key, now),
        "secrets": [f"sk-...{ending}" for ending in _endings(key, now)],
        **msgspec.to_builtins(key.limits),
        "created_at": key.created_at,
        "revoked_at": key.revoked_at,
    }


def _is_over(until: float | None, now: float) -> bool:
    return until is not None and until <= now


def _endings(key: ApiKey, now: float) -> list[str]:
    return [secret.ending for secret in key.secrets if not _is_over(secret.expires_at, now)]


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
        print_json([_key_facts(key, now) for key in keys])
    elif not keys:
        print("there are no keys; create one: penstock keys create --name NAME")
    else:
        rows = [
            (key.name, key.id, ",".join(_endings(key, now)), _key_state(key, now))
            + (_moment(key.created_at), _limits_text(key))
            for key in keys
        ]
        print(table(rows, ("NAME", "ID", "ENDS", "STATE", "CREATED", "LIMITS")))


def _run_usage(options: argparse.Namespace) -> int:
    from penstock.gateway.accounting.usage_store import UsageStore

    if options.action == "prune" or options.before is not None or options.keep is not None:
        return _prune(options)
    since = 0.0 if options.since is None else time.time() - options.since
    store = UsageStore(_open(options))
    lines = _priced(store, options.by, since, dict(options.price))
    gpu_time = store.gpu_time(since)
    shares = _gpu_shares(store, options.by, since, gpu_time)
    tokens = ("prompt_tokens", "cached_tokens", "output_tokens")
    columns = (*options.by, "requests", *tokens, "estimates", "refused", "cost_usd", *(_GPU_COLUMNS if shares else ()))
    rows = [
        (*line.group, line.n_requests - line.n_refused, *line.tokens, line.n_estimates, line.n_refused)
        + (None if line.cost_usd is None else round(line.cost_usd, 6),)
        + (tuple(shares.get(line.group, (None, None, None))) if shares else ())
        for line in lines
    ]
    if options.json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
    elif options.csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
    elif not rows:
        print("no requests yet")
    else:
        has_gpu_cost = any(share.usd is not None for share in shares.values())
        head = [column.upper().replace("_", " ") for column in columns[: len(options.by) + 6]]
        head += ["COST", *(["GPU COST"] if has_gpu_cost else [])]
        cells = []
        for line, row in zip(lines, rows, strict=True):
            share = shares.get(line.group)
            costs = [line.cost_usd, *([share.usd if share else None] if has_gpu_cost else [])]
            words = ["-" if value in (None, "") else str(value) for value in row[: len(options.by) + 6]]
            cells.append(words + ["-" if usd is None else show_usd(usd) for usd in costs])
        print(table(cells, head, right=range(len(options.by), len(head))))
    if gpu_time and not options.json and not options.csv:
        print(_gpu_words(store, since, gpu_time))
    return 0


def _gpu_shares(
    store: UsageStore, by: tuple[Grouping, ...], since: float, gpu_time: dict[str, GpuUse]
) -> dict[tuple[str, ...], GpuShare]:
    from penstock.gateway.metrics.cost import gpu_shares

    if not gpu_time:
        return {}
    lines = store.usage((*by, "model"), since)
    return gpu_shares(
        [(line.group[:-1], line.group[-1], line.prompt_tokens + line.output_tokens) for line in lines], gpu_time
    )


def _gpu_words(store: UsageStore, since: float, gpu_time: dict[str, GpuUse]) -> str:
    """ "GPUs: 12.4 hours ready, 43 % of them idle; $31.00, $1.23 per million tokens"."""
    hours = sum(use.gpu_s for use in gpu_time.values()) / 3600
    idle = 1 - sum(use.busy_s for use in gpu_time.values()) / 3600 / hours if hours else 0.0
    prices = [use.usd for use in gpu_time.values() if use.usd is not None]
    text = f"GPUs: {hours:.1f} hours ready, {idle:.0%} of them idle"
    if not prices:
        return text
    n_tokens = sum(line.prompt_tokens + line.output_tokens for line in store.usage((), since))
    cost = f"; {show_usd(sum(prices))}"
    return text + cost + (f", {show_usd(sum(prices) / n_tokens * 1e6)} per million tokens" if n_tokens else "")


def _prune(options: argparse.Namespace) -> int:
    """`usage prune`. After a kill, the next one continues where it stopped."""
    from penstock.gateway.accounting.usage_store import DAY_S, UsageStore, day_of

    if options.action != "prune" or (options.before is None) == (options.keep is None):
        raise UserError("cannot prune usage without one limit", hint="penstock usage prune --keep 90d, or --before DAY")
    before = options.before if options.keep is None else time.time() - options.keep
    # Not today: gateways still add to it.
    before = max(0.0, min(before, time.time())) // DAY_S * DAY_S
    database = _open(options)
    store = UsageStore(database)
    n_rows = 0
    while n_pruned := store.prune(before):
        n_rows += n_pruned
    database.compact()
    if options.json:
        print_json({"before": day_of(before), "requests": n_rows})
    else:
        print(f"{n_rows} requests from before {day_of(before)} (UTC) are kept as sums by day")
    return 0


def _priced(store: UsageStore, by: tuple[Grouping, ...], since: float, prices: dict[str, Price]) -> list[Usage]:
    import msgspec

    from penstock.gateway.accounting.usage_store import add_usage

    with_model: tuple[Grouping, ...] = by if "model" in by or not prices else (*by, "model")
    lines = []
    for line in store.usage(with_model, since):
        price = prices.get(line.group[with_model.index("model")]) if prices else None
        known = line.cost_usd if price is None else price.cost_usd(*line.tokens)
        lines.append(msgspec.structs.replace(line, group=line.group[: len(by)], cost_usd=known))
    return add_usage(lines)
