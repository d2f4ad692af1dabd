"""The verb `dashboard`: opens the live page of a deployment in the browser, with the key that reads it; or
prints the token of Ray's dashboard."""

from __future__ import annotations

import argparse
import contextlib
import getpass
import html
import ipaddress
import os
import sys
import webbrowser
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from penstock.cli import arguments
from penstock.cli.output import print_json, print_step
from penstock.errors import PenstockError, UserError

if TYPE_CHECKING:
    from penstock.run_folder import Run

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_ANSWER_S = 10.0


class PageAddress(NamedTuple):
    """`key`: opens it; None where none is needed. `verb`: the command that shows it; `meaning`: what the key may."""

    url: str
    key: str | None
    verb: str = "dashboard"
    meaning: str = "The key in it reads the page's numbers and the metrics, and changes nothing."

    @property
    def link(self) -> str:
        """With the key in the fragment, which a browser sends to no server."""
        return self.url if self.key is None else f"{self.url}#key={self.key}"


def register(parser: argparse.ArgumentParser) -> None:
    arguments.add_name(parser)
    parser.add_argument("--no-open", action="store_true", help="print the address, with the key, and open nothing")
    text = "print only the token that Ray's dashboard of one replica asks for (engine.executor: ray)"
    parser.add_argument("--ray", metavar="N", dest="ray_replica", help=text)
    # Asked for by another machine: this one is next to the gateway.
    parser.add_argument("--inside", dest="is_inside", action="store_true", help=argparse.SUPPRESS)
    arguments.add_json(parser, "print the address and the key as JSON, and open nothing")
    examples = ("penstock dashboard", "penstock dashboard qwen --no-open", "penstock dashboard qwen --ray 0")
    arguments.complete(parser, _run, examples)


def key_of(run: Run) -> str | None:
    """What reads its page; None where none is needed."""
    return run.scrape_key() if run.deployment().gateway.auth == "keys" else None


def address_of(run: Run) -> PageAddress:
    """Where this machine's browser reaches the page.  Raises UserError when the deployment is down."""
    if run.is_ended():
        raise UserError(f'cannot show deployment "{run.name}": it is down', hint="penstock ls")
    return PageAddress(f"{run.url}/dashboard", key_of(run))


def show(options: argparse.Namespace, run: Run, address: PageAddress) -> None:
    """Open the page, or print where it is. `run`: one on a login node has no folder here, and a page of no deployment
    no name."""
    if options.json:
        print_json({"url": address.url, "key": address.key})
    elif not options.no_open and _has_display() and _open(run, address):
        again = f" (`penstock {address.verb} {run.name} --no-open` prints it with its key)" if run.name else ""
        print_step(f"opened {address.url}{again}")
    else:
        print(address.link, flush=True)
        _explain(address)


def _run(options: argparse.Namespace) -> int:
    from penstock import paths, run_folder

    if options.is_inside:  # in some targets its run folder is not whole
        run = run_folder.Run(paths.home() / "runs" / options.name)
        _show_ray_token(options, run, run_folder.reachable(run.gateway_file().admin))
        return 0
    run = run_folder.choose(options.name)
    address = address_of(run)
    if options.ray_replica is None:
        show(options, run, address)
    else:
        _show_ray_token(options, run, urlsplit(run.admin_url).netloc)
    return 0


def _show_ray_token(options: argparse.Namespace, run: Run, admin: str) -> None:
    """On standard output, and nothing else there. `admin`: the gateway's admin address."""
    refused = f'cannot show the token of Ray\'s dashboard of "{run.name}"'
    if run.plan().executor == "mp":
        raise UserError(f"{refused}: its replicas run without Ray", hint="It needs engine.executor: ray.")
    token = _ray_token(f"http://{admin}", run.admin_token(), options.ray_replica)
    if token is None:
        message = f'{refused}: its replica "{options.ray_replica[:100]}" has no Ray now'
        raise PenstockError(message, hint=f"penstock status {run.name}", is_retryable=True)
    if options.json:
        print_json({"token": token})
        return
    print(token, flush=True)
    print_step("It opens Ray's dashboard and its job API, which runs code on the replica's nodes.")
    print_step(f"The address is in the log: penstock logs {run.name} --replica {options.ray_replica}")


def _ray_token(admin_url: str, admin_token: str, replica: str) -> str | None:
    """What the replica's first node tells the others by the board, while its Ray runs.  Raises PenstockError."""
    import msgspec

    from penstock.node.group.rendezvous import GONE_AFTER_S
    from penstock.wire.announcement import PostView
    from penstock.wire.gateways import ask_each, clients

    gateways = clients(admin_url, admin_token, _ANSWER_S)
    boards = ask_each(gateways, lambda gateway: gateway.get_json("/admin/board"))
    for row in (row for board in boards for row in msgspec.convert(board, list[PostView])):
        if (row.post.replica, row.post.rank) == (replica, 0) and row.age_s < GONE_AFTER_S:
            return row.post.content.get("formation", {}).get("ray_token") or None
    return None


def _has_display() -> bool:
    """Whether a browser would show up in front of the user. Text browsers run no script."""
    if "BROWSER" in os.environ:
        return True
    if sys.platform == "darwin":
        return "SSH_CONNECTION" not in os.environ
    return "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ


def _open(run: Run, address: PageAddress) -> bool:
    """Opens a file of the user's that leads to the page: everyone on the machine can read a browser's command line."""
    from penstock.paths import home, write_atomically

    name = f"{address.verb}.html"
    file = run.admin_token_file.with_name(name) if run.exists() else home() / f"{address.verb}-{run.name}.html"
    link = html.escape(address.link)
    text = f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={link}"><title>...</title>'
    write_atomically(file, text.encode(), mode=0o600)
    return webbrowser.open(file.as_uri())


def _is_near(host: str) -> bool:
    """Whether other networks do not reach it: loopback, and nodes of a cluster."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_private
    return host in _LOOPBACK


def _explain(address: PageAddress) -> None:
    if address.key is not None:
        print_step(address.meaning)
    place = urlsplit(address.url)
    connection = os.environ.get("SSH_CONNECTION", "").split()
    if _is_near(place.hostname or "") and len(connection) == 4:  # man ssh: client address and port, ours
        host = f"{getpass.getuser()}@{connection[2]}"
        print_step(f"From your machine: ssh -N -L {place.port}:{place.netloc} {host}")
